"""Which site of a plan changes a model's result: a search by halves over how many of its sites are fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusionreg.checking import Reference, Verdict, chosen_device, placed
from fusionreg.core.errors import FusionregError
from fusionreg.core.proof.report import Status
from fusionreg.integrations import open_model
from fusionreg.model import FusedModel

if TYPE_CHECKING:
    from fusionreg.api import Registry
    from fusionreg.core.planner.plan import Plan, Policy
    from fusionreg.integrations import Declared, Opened

Progress = Callable[[int, int, str], None]
ORIGINAL, CHAIN = "the original", "the unfused operators"


@dataclass(frozen=True)
class Bisection:
    """What the search found.

    Attributes:
        sites: how many the plan fuses.
        runs: how many times the model ran fused.
        against: what its results were held against: the original artefact, or the unfused operators where that has no
            answer.
        index: of the first site that changes the result, in the order of the graph, which is the fuel before it; None
            where none does.
        fusion, nodes, source, kernel: of that site.
        reason: how the result is wrong with it.
        max_abs, max_rel: deviation of the whole with it, and of the whole without where no site is to blame.
        unfused: whether the result is wrong without any fusion: then no site is to blame.
    """

    sites: int
    runs: int
    against: str
    index: int | None = None
    fusion: str = ""
    nodes: tuple[str, ...] = ()
    source: str = ""
    kernel: str = ""
    reason: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    unfused: bool = False

    def __str__(self) -> str:
        if self.unfused:
            return f"no fusion is to blame: unfused, too, the result differs from {self.against}: {self.reason}"
        if self.index is None:
            return f"all {self.sites} sites fused, the result is that of {self.against} (max rel {self.max_rel:.3g})"
        at = f" ({self.source})" if self.source and self.source != self.nodes[-1] else ""
        return (
            f"site {self.index + 1} of {self.sites} changes the result: {self.fusion} at {self.nodes[-1]}{at}, "
            f"kernel {self.kernel or 'none'}: {self.reason}"
        )


def bisect_model(
    registry: Registry,
    target: Any,
    *,
    device: str = "auto",
    seed: int = 0,
    policy: Policy = "balanced",
    tolerance: float | None = None,
    declared: Sequence[Declared] = (),
    progress: Progress | None = None,
) -> Bisection:
    """Opens and plans a model, and searches for the site that changes its result.

    Args:
        target, device, seed, policy, declared: as for ``checking.check_model``.
        tolerance: how far the result may be from the original, relative to the largest magnitude of an output; None for
            the contract: at most twice the error of the original or of the unfused chain against float64, and one ulp.
        progress: told (runs so far, runs at most, what is run).
    """
    opened = open_model(target, ops=registry.catalog.ops, declared=declared)
    plan = registry.plan(opened, policy=policy)
    return bisect(registry, opened, plan, device=device, seed=seed, tolerance=tolerance, progress=progress)


def bisect(
    registry: Registry,
    opened: Opened,
    plan: Plan,
    *,
    device: str = "auto",
    seed: int = 0,
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> Bisection:
    """The same for a plan of an opened model.

    A model whose first ``n`` sites give a good result and whose first ``n + 1`` give a bad one is found in about
    log2(sites) runs. Where several sites are wrong, one of them is found; where two cancel out, none may be.
    A run that fails counts as a bad one.
    """
    place = chosen_device(device)
    inputs = dict(opened.example(seed))
    runs = 0
    unfused = FusedModel.build(opened.graph, plan.limited(0), registry.catalog, registry.runtime)
    wanted = Reference.of(opened, unfused, inputs)
    against = CHAIN if wanted.expected is None else ORIGINAL

    def attempt(fuel: int) -> tuple[Verdict, str]:
        """How the result is with so many sites, and the kernel of the last."""
        nonlocal runs
        runs += 1
        if progress is not None:
            progress(runs, 2 + len(plan).bit_length(), f"{fuel} of {len(plan)} sites")
        part = plan.limited(fuel)
        model = FusedModel.build(opened.graph, part, registry.catalog, registry.runtime)
        last = part.chosen[-1].nodes if part.chosen else ()

        def kernel() -> str:
            return next((s.kernel for s in model.sites if set(s.nodes) == set(last)), "")

        try:
            outputs = model(**placed(inputs, place))
        except FusionregError as error:
            return Verdict(Status.RUNTIME_ERROR, str(error)), kernel()
        return wanted.judge(outputs), kernel()

    def good(verdict: Verdict) -> bool:
        if tolerance is None or verdict.status not in (Status.PASSED, Status.INCORRECT_NUMERICAL):
            return verdict.status is Status.PASSED
        return verdict.max_rel <= tolerance

    low, high = 0, len(plan)
    verdict, kernel = attempt(high)
    if good(verdict):
        return Bisection(len(plan), runs, against, max_abs=verdict.max_abs, max_rel=verdict.max_rel)
    bare, _ = attempt(0) if high else (verdict, "")
    if not good(bare):
        return Bisection(
            len(plan), runs, against, reason=_said(bare, tolerance), max_abs=bare.max_abs, max_rel=bare.max_rel,
            unfused=True,
        )  # fmt: skip
    while high - low > 1:
        middle = (low + high) // 2
        found, by = attempt(middle)
        if good(found):
            low = middle
        else:
            high, verdict, kernel = middle, found, by
    match = plan.chosen[high - 1]
    return Bisection(
        len(plan), runs, against, high - 1, match.fusion, match.nodes, opened.graph.node_by_name[match.root].source,
        kernel, _said(verdict, tolerance), verdict.max_abs, verdict.max_rel,
    )  # fmt: skip


def _said(verdict: Verdict, tolerance: float | None) -> str:
    if verdict.reason or tolerance is None:
        return verdict.reason
    return f"{verdict.max_rel:.3g} of the largest magnitude — at most {tolerance:.3g}"
