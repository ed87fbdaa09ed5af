"""Templates → units of CUDA C++. Floor 4."""

from ..problem.geometry import Launch, launch_geometry
from .environment import shared_library
from .lines import directive
from .prelude import Argument
from .source import LIBRARY, OPTIONS, KernelSource, render, variant

__all__ = [
    "LIBRARY", "OPTIONS", "Argument", "KernelSource", "Launch", "directive", "launch_geometry", "render",
    "shared_library", "variant",
]  # fmt: skip
