"""The operators that a fusion stands for, one by one: what runs where no kernel accepts a call. Floor 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..evaluate.evaluator import Evaluator
from ..ops import Vocabulary
from ..pattern.instantiate import instantiate
from ..problem import Problem
from .call import Call

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry
    from .launch import Allocation


class Unfused:
    """A prepared launch. Its outputs lie as a kernel's, in memory of their own: an operator may hand its input back."""

    kernel = ""
    guard: Callable[[], bool] | None = None

    def __init__(
        self, evaluate: Callable[[Sequence[Any]], tuple[Any, ...]], allocation: Allocation, reason: str
    ) -> None:
        self.evaluate, self.reason, self.calls = evaluate, reason, 0
        self._outputs, self._finished = allocation.outputs, allocation.finished

    def outputs(self) -> tuple[Any, ...]:
        return ()  # evaluation makes its own

    def run(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        found = self.evaluate(inputs)
        if not outputs:
            return self._finished(found, inputs)
        for target, value in zip(outputs, found, strict=True):
            target[...] = value
        return outputs

    def binder(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Callable[[], Any]:
        held = outputs or self._outputs()
        return lambda: self.run(inputs, held)


def evaluation(
    entry: FusionEntry, call: Call, problem: Problem, ops: Vocabulary
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function of a call's inputs that gives the outputs of the fusion's first spelling."""
    graph = instantiate(
        entry.patterns[0], entry.spec, dtypes=problem.dtypes,
        shapes={n: call.tensors[n].shape for n in call.arrays}, ops=ops, choices=problem.choices,
        attributes=problem.attributes, absent=[n for n in entry.inputs if n not in call.arrays],
    )  # fmt: skip
    evaluator, names, outputs = Evaluator(graph, ops=ops), tuple(entry.inputs), problem.output_names

    def evaluate(arrays: Sequence[Any]) -> tuple[Any, ...]:
        found = evaluator.run({n: a for n, a in zip(names, arrays, strict=False) if a is not None})
        return tuple(found[n] for n in outputs)

    return evaluate
