"""Rows together: the mean of what has a goal, the worst by name, and large tensors beside a copy."""

from __future__ import annotations

import pytest

from fusionreg.core.bench import Result, Results, Spread
from fusionreg.core.bench.listing import CHANGED
from fusionreg.core.bench.page import page
from fusionreg.core.bench.summary import groups


def memory(found: Results, workload: str, mode: str, moved: int, times: dict[str, float]) -> Result:
    first = found.rows[0].columns[0]
    columns = tuple(
        first.model_copy(update={"name": n, "ours": n == "plain", "time": Spread(median=t, min=t, p20=t, p80=t, n=9)})
        for n, t in times.items()
    )
    facts = {"row": "S6 more", "bound": "memory", "goal_ms": None, "floor_ms": 0.04, "chosen": "plain"}
    own = {"workload": workload, "mode": mode, "read": moved, "written": moved, "columns": columns}
    return found.rows[0].model_copy(update=facts | own)


def test_groups(found) -> None:
    large = memory(found, "large", "b", 80_000_000, {"plain": 0.08, "eager": 0.05})
    small = memory(found, "small", "b", 20_000_000, {"plain": 0.2})
    graph = memory(found, "graph", "g", 80_000_000, {"plain": 0.2})
    seen = groups(found.model_copy(update={"rows": (*found.rows, large, small, graph)}))
    assert [(g.row, len(g.rows)) for g in seen] == [("S6 more", 3), ("S15", 3)]  # nothing of what was refused
    more, products = seen
    assert products.mean == pytest.approx(2.0 / 1.5) and products.copy is None  # of one of three there is a goal
    assert products.cells()[3] == "1.33 (gemm.scale_bias 8192x8192x8192-bf16)"
    assert more.copy == (large, pytest.approx(160_000_000 / 0.08e-3 / 4.26e12))
    assert more.cells() == (
        "S6 more", "3", "–", "–", "1.6 (gemm.scale_bias large)", "20% (gemm.scale_bias small)",
        "47% (gemm.scale_bias large)",
    )  # fmt: skip
    assert [g.row for g in groups(found, {r.key for r in found.rows})] == []


def test_the_page_says_what_is_outdated(found) -> None:
    pytest.importorskip("matplotlib")
    assert page(found, {found.rows[0].key}).count(CHANGED) == 1 and "1.33 (gemm.scale_bias 8192" in page(found)
    assert CHANGED not in page(found) and "1.33 (" not in page(found, {found.rows[0].key})
