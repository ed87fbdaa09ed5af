"""What ``torch.compile(model, backend="fusionreg", options={…})`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_args

from fusionreg.core.errors import ArgumentError, UnknownNameError
from fusionreg.core.frozen import EMPTY
from fusionreg.core.planner.plan import Policy

if TYPE_CHECKING:
    from fusionreg.api import Registry

    from .report import Report

INNER = ("inductor", "eager")
#: Seconds that measuring the sites of one graph may take.
MEASURING = 60.0


@dataclass(frozen=True)
class Options:
    """How the backend works.

    Attributes:
        policy: which sites are fused; see ``docs/planning.md``.
        inner: who runs what is not fused: ``inductor``, or ``eager``: torch's own kernels one by one.
        inner_options: options of Inductor, as ``torch.compile`` would give it.
        mode: a mode of ``torch.compile`` for Inductor, such as ``max-autotune-no-cudagraphs``: ``torch.compile`` itself
            takes either options or a mode. ``inner_options`` come on top of it.
        cuda_graph: capture what is called without gradients into CUDA graphs, one for each signature of its inputs, and
            replay them; the callable's own ``report`` tells how many, and why not where not.
        explain: print, for each graph, what was fused, what was not and why.
        report: called with the :class:`Report` of each graph.
        registry: the fusions to use; by default those of all installed plugins.
        device: where fused kernels run: ``cuda``, or ``sim`` for tensors on the CPU, which is for tests.
        measure: sites that a plan rests on and nobody has measured on this machine are measured while compiling, beside
            the inner backend's code for them, in processes of their own, and the plan is made again; results are kept.
            A graph has a minute for it, or so many seconds as this says.
        strict: raise where a graph cannot be rewritten, instead of leaving it as it is.
    """

    policy: Policy = "balanced"
    inner: str = "inductor"
    inner_options: Mapping[str, Any] = EMPTY
    mode: str | None = None
    cuda_graph: bool = False
    explain: bool = False
    report: Callable[[Report], None] | None = None
    registry: Registry | None = field(default=None, compare=False)
    device: str = "cuda"
    measure: bool | float = False
    strict: bool = False

    @property
    def measuring(self) -> float:
        """Seconds that measuring the sites of one graph may take."""
        return MEASURING if self.measure is True else float(self.measure)

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Options by name.

        Raises:
            UnknownNameError: an option, a policy or an inner backend that there is not.
            ArgumentError: another value that does not fit.
        """
        given = dict(given or {})
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise UnknownNameError.among("option of backend fusionreg", name, names)
        made = cls(**given)
        for kind, name, known in made._names():
            if name not in known:
                raise UnknownNameError.among(kind, name, known)
        for name, holds, expected in made._demands():
            if not holds:
                raise ArgumentError("cannot compile", "backend fusionreg", f"{name} {given[name]!r}", expected)
        return made

    def _names(self) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        """What must be one of few: kind, name, which there are."""
        yield "policy", self.policy, get_args(Policy)
        yield "inner backend", self.inner, INNER
        if self.mode is not None:
            yield "mode of torch.compile", self.mode, ("default", *_modes())

    def _demands(self) -> Iterator[tuple[str, bool, str]]:
        """What else must hold: option, whether it does, what is expected."""
        yield "device", self.device in ("cuda", "sim"), "'cuda' or 'sim'"
        for name in ("cuda_graph", "explain", "strict"):
            yield name, isinstance(getattr(self, name), bool), "True or False"
        yield "measure", isinstance(self.measure, bool | int | float) and self.measure >= 0, "a bool, or seconds"
        yield "report", self.report is None or callable(self.report), "a function of a Report"
        yield "registry", self.registry is None or _loaded(self.registry), "what load_registry() returns"
        yield "inner_options", isinstance(self.inner_options, Mapping), "a mapping"
        for name in ("inner_options", "mode") if self.inner == "eager" else ():
            yield name, not getattr(self, name), "none beside inner 'eager': they are of Inductor"


def _loaded(registry: Any) -> bool:
    from fusionreg.core.registry.catalog import Catalog

    return isinstance(getattr(registry, "catalog", None), Catalog)


def _modes() -> tuple[str, ...]:
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())
