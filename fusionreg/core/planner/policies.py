"""What a policy takes, and why it does not take the rest. Floor 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ..matcher.match import Match
from .costs import CostModel
from .savings import MARGIN, Saving

#: ``off`` takes nothing. ``conservative`` takes fusions with a kernel that rounds where the unfused chain rounds
#: (``per_op``), where a measurement says that they win against the executor of the rest. ``balanced`` takes what saves
#: time, by a measurement or, without one, by the model; a product that is more than a launch needs the measurement,
#: since the library that it competes with comes near to the device's rates. ``aggressive`` takes every site that some
#: kernel accepts and that does not lose its nodes to a better one, whatever it saves, regions beside Inductor too; what
#: is read elsewhere may be computed twice for it, where that saves time.
Policy = Literal["off", "conservative", "balanced", "aggressive"]

FUEL = "fuel"

#: Why a match is not taken that only a measurement could let in.
UNSURE = "the rate of its products counts: it needs a measurement, and there is none of the like"
#: How the reason ends where a match has fewer launches or moves less, and yet loses by the model alone.
MODELLED = "by the model alone: nothing like it was measured"


def undecided(reason: str) -> bool:
    """Whether a measurement could let in a match that was not taken for this reason."""
    return reason == UNSURE or reason.endswith(MODELLED)


def refusal(
    m: Match,
    saving: Saving,
    policy: Policy,
    cost: CostModel,
    plain: bool,
    accepts: Callable[[Match], str | None] | None,
    fusions: Any,
) -> str | None:
    """Why a policy does not take a match, whatever else there is; None where it may.

    ``plain``: whether all of its operators are point-wise. Others as for ``plan``.
    """
    if policy == "off":
        return "the policy is off"
    if policy == "conservative":
        kernels = fusions[m.fusion].kernels if fusions is not None else ()
        if not any(k.spec.rounding == "per_op" and not k.spec.pending for k in kernels):
            return "policy conservative: no kernel rounds per operator"
        if not saving.measured:
            return f"policy conservative: nothing like it was measured against {cost.executor}"
    if plain and cost.executor.chains and policy != "aggressive":
        return f"point-wise operators alone: {cost.executor} makes one kernel of them too"
    if accepts is not None and (reason := accepts(m)):
        return reason
    if m.kept and not saving.wins:
        return f"interior values are needed elsewhere, {', '.join(m.kept)} would run beside it, and it {_lost(saving)}"
    if policy != "aggressive" and saving.unsure:
        return UNSURE
    if policy != "aggressive" and not saving.wins:
        return _lost(saving)
    return None


def _lost(saving: Saving) -> str:
    """Why a saving is none, in words."""
    cost = saving.cost
    less = cost.launches > 0 or (cost.launches == 0 and cost.bytes > 0)
    by = f" ({saving.basis})" if saving.measured else f", {MODELLED}" if less else ""
    if cost.seconds <= 0 and cost.launches == 0 and cost.bytes <= 0 and not saving.measured:
        return "saves nothing: unfused it is one kernel already"
    if cost.seconds <= 0 and cost.launches < 0:
        figures = f"{-cost.launches} launches and {-cost.bytes} bytes more"
        return f"saves no time: it breaks up kernels that hold its neighbours too, {figures}{by}"
    if cost.seconds <= 0:
        figures = f"{cost.launches} launches, {cost.bytes} bytes"
        return f"saves no time: {figures} less, and yet {-cost.seconds * 1e6:.2f} µs more{by}"
    return f"saves {saving.share:.1%} of its time, within the {MARGIN:.0%} that measurements scatter{by}"
