"""What a run of kernels proves and leaves behind: units, evidence, reports, reproducers. Floor 7."""
