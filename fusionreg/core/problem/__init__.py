"""A call's concrete problem: what shapes, dtypes, strides and attributes say about one fusion. Floor 4.

>>> problem = bind(entry, {"x": Tensor.contiguous("float16", (4, 8)), ...}, {"activation": "Relu"}, "sm_90a")
>>> selection = select(entry, problem)
"""

from .binding import Outline, bind, outlines
from .geometry import Launch, launch_geometry
from .selection import Candidate, Preferences, Refusal, Selection, choose, combinations, fits, select
from .tensor_maps import TensorMapLayout
from .types import Problem, Tensor

__all__ = [
    "Candidate", "Launch", "Outline", "Preferences", "Problem", "Refusal", "Selection", "Tensor",
    "TensorMapLayout", "bind", "choose", "combinations", "fits", "launch_geometry", "outlines", "select",
]  # fmt: skip
