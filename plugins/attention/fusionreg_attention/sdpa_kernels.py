"""Kernels of the fusions in ``sdpa``."""
