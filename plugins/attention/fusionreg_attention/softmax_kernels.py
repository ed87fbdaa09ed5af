"""Kernels of the fusions in ``softmax``."""
