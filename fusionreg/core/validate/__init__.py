"""Load-time checks of specs: names, fusions, kernels, references; and of a plugin's folder. Floor 3."""
