"""Every error the product raises for bad input. One form: ``what whom: found — expected. next step``.

Floor 0: imports nothing of the product.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

#: Up to this many names are listed where none is near.
FEW = 6


class FusionregError(Exception):
    """Base of all typed errors.

    Args:
        what: what failed, e.g. ``"cannot load model"``.
        whom: for whom: a plugin, fusion, field, file or node name. May be empty.
        found: what was there.
        expected: what would have been right.
        next_step: what the reader can do now; a whole sentence without its full stop.
        **facts: the machine-readable facts of this failure, kept in :attr:`facts`.
    """

    def __init__(
        self, what: str, whom: str = "", found: str = "", expected: str = "", next_step: str = "", **facts: object
    ) -> None:
        self.what, self.whom, self.found, self.expected, self.next_step = what, whom, found, expected, next_step
        self.facts = facts
        head = f"{what} {whom}".strip()
        body = " — ".join(part for part in (found, expected) if part)
        text = f"{head}: {body}." if body else f"{head}."
        super().__init__(f"{text} {next_step}." if next_step else text)

    def __reduce__(self):  # exceptions with keyword facts must survive a process boundary
        return _rebuild, (type(self), self.what, self.whom, self.found, self.expected, self.next_step, self.facts)


def _rebuild(cls, what, whom, found, expected, next_step, facts):
    return cls(what, whom, found, expected, next_step, **facts)


class SpecError(FusionregError):
    """A spec is wrong; ``facts``: plugin, fusion, kernel, field."""


class ExpressionError(SpecError):
    """An expression of a spec does not parse, names something unknown, or fails when evaluated."""


class PatternError(SpecError):
    """Pattern text does not parse or contradicts the spec; ``facts``: line, column."""


class PluginError(FusionregError):
    """A plugin cannot be imported, claimed a name it does not own, or failed in a hook."""


class UnknownNameError(FusionregError, KeyError):
    """A name that nothing has; the message offers the nearest ones."""

    @classmethod
    def among(cls, kind: str, name: str, known: Iterable[str], next_step: str = "") -> UnknownNameError:
        known = sorted(known)
        close = get_close_matches(str(name), known, n=3, cutoff=0.5)
        listed = ", ".join(known) if len(known) <= FEW else f"{len(known)} known names"
        expected = f"did you mean {' or '.join(close)}" if close else f"one of {listed}" if known else "there is none"
        return cls("unknown", kind, repr(name), expected, next_step, name=name, close=tuple(close))

    def __str__(self) -> str:  # KeyError quotes its argument; this is a sentence
        return Exception.__str__(self)


class ModelError(FusionregError):
    """A model file or graph cannot be read: format, opset, missing weight, unsupported operator."""


class GraphError(FusionregError):
    """An IR graph breaks an invariant, or shape and type inference fails; ``facts``: node."""


class PlanError(FusionregError):
    """A stored plan is damaged, or is none for this graph and these plugins; ``facts``: field."""


class RenderError(FusionregError):
    """A template cannot be rendered; ``facts``: template, line, variable."""


class CompileError(FusionregError):
    """NVRTC or the host compiler refused a unit; the log's lines point into the ``.cu.j2``; ``facts``: log, arch."""


class MissingDependencyError(FusionregError, ImportError):
    """An extra, a compiler or a header is missing; the message names what to install."""


class ArgumentError(FusionregError, ValueError):
    """A call's arrays or attributes do not fit the fusion: dtype, shape, device, count, overlap, range."""


class MisfitError(ArgumentError):
    """Shapes, dtypes or attributes of a call are outside what the fusion declares; its operators may take them."""


class LaunchError(FusionregError, RuntimeError):
    """The driver refused a module or a launch, or the geometry passes a limit of the device."""


class UnsupportedError(LaunchError):
    """A library has no call for a problem that its kernel accepts; other kernels may take it."""


class SimulatorError(FusionregError, RuntimeError):
    """The simulator caught a fault in a kernel; ``facts``: detector, and where it stands."""


class CacheError(FusionregError):
    """The cache cannot be used at all (never raised for a bad entry, which is a miss)."""
