"""measure=True: what a plan rests on is measured, and the plan is made again; what cannot be is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fusionreg.core.errors import FusionregError
from fusionreg.integrations.torch.compile import segment

from .conftest import fused


def block(x: Any, w: Any) -> Any:
    return F.layer_norm(F.gelu(x), (16,), w)


GIVEN = torch.ones(8, 16), torch.ones(16)


def test_a_plan_is_made_again_as_long_as_something_was_measured(
    compiled: Any, reports: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, answers = list[Any](), iter((3, 1, 0))

    def measure(self: Any, plan: Any, device: int, seconds: float, also: Any) -> tuple[int, int]:
        plans.append((plan, device, seconds))
        return next(answers, 0), 0

    monkeypatch.setattr(type(registry), "measure", measure)
    with torch.no_grad():
        compiled(block, measure=True)(*GIVEN)
    assert [len(p.chosen) for p, *_ in plans] == [1, 1, 1, 1], (
        "thrice the captured graph, and what autograd makes of it"
    )
    assert {device for _, device, _ in plans} == {0}
    assert all(59 < seconds <= 60 for *_, seconds in plans)
    assert len(fused(reports)) == 1, "one report of one graph"
    monkeypatch.setattr(type(registry), "measure", lambda self, plan, *_: plans.append(plan) or (1, 0))
    plans.clear()
    with torch.no_grad():
        compiled(block, measure=True)(*GIVEN)
    assert len(plans) == 2 * 3, "at most so often"


def test_measuring_has_its_time(compiled: Any, reports: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose time is over is planned with what there is, and says so."""
    now, asked = [0.0], list[float]()

    def measure(self: Any, plan: Any, device: int, seconds: float, also: Any) -> tuple[int, int]:
        asked.append(seconds)
        now[0] += 4.0
        return 1, 3

    monkeypatch.setattr(segment, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(type(registry), "measure", measure)
    with torch.no_grad():
        compiled(block, measure=7.0)(*GIVEN)
    assert asked == [7.0, 3.0] * 2, "the captured graph, and what autograd makes of it"
    assert reports[0].unmeasured == 3 and "not measured: 3 sites" in str(reports[0])
    with pytest.raises(Exception, match="cannot compile backend fusionreg: measure -1"):
        compiled(block, measure=-1)(*GIVEN)


def test_what_cannot_be_measured_is_told(compiled: Any, reports: Any) -> None:
    with torch.no_grad():
        compiled(block, measure=True, strict=False)(*GIVEN)
        assert fused(reports) and "the simulator" in reports[0].refused[0]
        with pytest.raises(Exception, match="cannot measure sites") as failure:
            compiled(block, measure=True)(*GIVEN)
    assert isinstance(failure.value.inner_exception, FusionregError)


def test_ranks_do_not_choose_for_themselves(compiled: Any, reports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_ranks", lambda: 2)
    with torch.no_grad():
        compiled(block, measure=True, strict=False)(*GIVEN)
    assert fused(reports) and "several processes" in reports[0].refused[0]


def test_backward_fusions_are_planned_as_what_they_read_lies(
    compiled: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[Any]()
    monkeypatch.setattr(type(registry), "measure", lambda self, plan, *given: found.extend(given[-1]) or (0, 0))
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    compiled(torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.ReLU()), measure=True)(x)
    (call,) = found
    assert call.fusion == "norm.batchnorm_relu_backward" and call.strides == {"dy": x.stride(), "x": x.stride()}
