"""Running fusions on arrays: GPU arrays on their GPU, CPU arrays in the simulator. Floor 6."""

from .bound import Bound
from .dispatch import FallbackWarning, Outcome, Runtime

__all__ = ["Bound", "FallbackWarning", "Outcome", "Runtime"]
