"""Plugins: discovered, loaded one by one, and held as a catalog of fusions and kernels. Floor 3."""
