"""What a compiled kernel takes of a multiprocessor, and how it treats shared memory: needs no GPU. Floor 7."""

from __future__ import annotations

from .banks import SharedMemory, Site, watch
from .question import Question, candidates, subject
from .variant import Measured, Variant, examine

__all__ = ["Measured", "Question", "SharedMemory", "Site", "Variant", "candidates", "examine", "subject", "watch"]
