"""Pattern text → :class:`PatternGraph`: parsed with :mod:`ast`, never executed. Floor 2.

The language is described in :mod:`fusionreg.core.pattern.instantiate`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import PatternError, UnknownNameError
from ..frozen import FrozenDict
from ..spec import REQUIRED, OpSpec
from .graph import (
    NONE,
    Alternative,
    AttributeName,
    Input,
    Literal,
    Operand,
    Output,
    PatternGraph,
    Step,
    attribute_names,
)

MAX_TEXT = 20_000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z", re.ASCII)


class PatternParser:
    """Reads one text. Everything it finds wrong is a :class:`PatternError` with line and column."""

    def __init__(self, text: str, ops: Mapping[str, OpSpec], whom: str) -> None:
        self.text, self.ops, self.whom = text, ops, whom
        self.steps: list[Step] = []
        self.inputs: dict[str, None] = {}
        self.assigned: dict[str, Output] = {}
        self.choices: dict[str, tuple[str, ...]] = {}
        self.attributes: set[str] = set()

    def fail(self, node: ast.AST | None, found: str, expected: str, hint: str = "", **facts: object) -> PatternError:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        where = f"of {self.whom}, line {line}" if self.whom else f"line {line}"
        return PatternError("bad pattern", where, found, expected, hint, line=line, column=column, **facts)

    def parse(self, outputs: Sequence[str] | None) -> PatternGraph:
        if len(self.text) > MAX_TEXT:
            raise self.fail(None, f"{len(self.text)} characters", f"at most {MAX_TEXT}")
        try:
            body = ast.parse(self.text).body
        except SyntaxError as e:
            node = ast.Pass(lineno=e.lineno or 1, col_offset=(e.offset or 1) - 1)
            hint = "Keyed alternatives stand last in any_of" if "follows keyword" in e.msg else ""
            raise self.fail(node, e.msg, "straight-line assignments", hint) from None
        except (ValueError, RecursionError, MemoryError) as e:
            raise self.fail(None, f"it does not parse ({type(e).__name__})", "straight-line assignments") from None
        if not body:
            raise self.fail(None, "it is empty", "at least one assignment, e.g. y = Relu(x)")
        for statement in body:
            try:
                self.statement(statement)
            except RecursionError:
                raise self.fail(statement, "calls are nested too deeply", "one assignment per step") from None
        return self.finish(outputs)

    def statement(self, node: ast.stmt) -> None:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            raise self.fail(node, f"{type(node).__name__.lower()} statement", "`name = Op(…)` or `a, b = Op(…)`")
        target = node.targets[0]
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        names = []
        for t in targets:
            if not isinstance(t, ast.Name) or not (_NAME.match(t.id) or t.id == "_"):
                raise self.fail(t, f"target {ast.unparse(t)!r}", "a plain name, or _ for an output nobody reads")
            names.append("" if t.id == "_" else t.id)
        if not isinstance(node.value, ast.Call):
            raise self.fail(node.value, f"{ast.unparse(node.value)!r} is assigned", "a call of an operator")
        step = self.call(node.value, tuple(names))
        for i, name in enumerate(names):
            if not name:
                continue
            if name in self.assigned:
                raise self.fail(node, f"{name!r} is assigned twice", "a new name for every value")
            if name in self.inputs:
                raise self.fail(node, f"{name!r} is read before it is assigned", "values assigned before they are read")
            self.assigned[name] = Output(step, i)

    # --- calls -------------------------------------------------------------------------------------------------

    def call(self, node: ast.Call, names: tuple[str, ...]) -> int:
        """Appends the step of ``Op(…)``, ``any_of(…)(…)`` or ``optional(…)(…)`` and returns its index."""
        shared = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.fail(node, "** in a call", "attributes by name")
            shared[keyword.arg] = self.attribute(keyword.value)
        alternatives, optional, choice, labelled = self.operator(node.func)
        alternatives = [Alternative(a.key, a.op, a.attributes | shared) for a in alternatives]
        operands = tuple(self.operand(a) for a in node.args)
        index = len(self.steps)
        for alternative in alternatives:
            self.check(node, alternative, operands, names)
        if optional and (not operands or not isinstance(operands[0], Input | Output)):
            raise self.fail(node, "an optional step without a first tensor operand", "the value that it becomes")
        if optional and len(names) > 1:
            raise self.fail(node, "an optional step with several outputs", "one output")
        if not choice and (labelled or len(alternatives) > 1 or optional):
            choice = names[0] if names else ""
        self.steps.append(Step(index, names or ("",), tuple(alternatives), operands, optional, choice, (), node.lineno))
        if labelled or len(alternatives) > 1:
            if not choice:
                raise self.fail(node, "alternatives without a name", 'a name for the choice: any_of(Relu, Tanh, "act")')
            self.choose(node, choice, alternatives, optional)
        return index

    def choose(self, node: ast.AST, name: str, alternatives: Sequence[Alternative], optional: bool) -> None:
        keys = (*(a.key for a in alternatives), *((NONE,) if optional else ()))
        if not _NAME.match(name):
            raise self.fail(node, f"choice {name!r}", "a name of letters, digits and underscores")
        if not all(_NAME.match(key) for key in keys):
            raise self.fail(node, f"choice {name!r} has keys {keys}", "keys of letters, digits and underscores")
        if len(set(keys)) < len(keys):
            raise self.fail(node, f"choice {name!r} has a key twice", "one key for each, e.g. gelu_tanh=Gelu(…)")
        if self.choices.setdefault(name, keys) != keys:
            raise self.fail(node, f"choice {name!r} has keys {keys}", f"{self.choices[name]}, as where it stood first")

    def operator(self, node: ast.expr) -> tuple[list[Alternative], bool, str, bool]:
        """What is called: its alternatives, whether it may be missing, the choice's name, whether it is a choice."""
        head = node.func if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or not isinstance(head, ast.Name) or head.id not in ("any_of", "optional"):
            return [self.alternative(node)], False, "", False
        form = head.id
        labels = [a for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        members = [a for a in node.args if a not in labels]
        if len(labels) > 1 or (labels and node.args[-1] is not labels[0]):
            raise self.fail(node, f"{form} with {len(labels)} strings", "at most one, last: the name of the choice")
        choice = str(labels[0].value) if labels else ""
        if form == "optional":
            if len(members) != 1 or node.keywords:
                raise self.fail(node, f"optional of {len(members) + len(node.keywords)} operators", "optional(Op)(…)")
            alternatives, optional, inner, labelled = self.operator(members[0])
            if optional:
                raise self.fail(node, "optional inside optional", "optional(Op)(…)")
            return alternatives, True, choice or inner, bool(choice) or labelled
        alternatives = [self.alternative(m) for m in members]
        alternatives += [self.alternative(k.value, k.arg or "") for k in node.keywords]
        if not alternatives:
            raise self.fail(node, "any_of without operators", "any_of(Op, key=Op(attribute=value))(…)")
        if any(a.key == NONE for a in alternatives):
            raise self.fail(node, f"key {NONE!r} of an operator", "another key: it means that the step is left out")
        return alternatives, False, choice, True

    def alternative(self, node: ast.expr, key: str = "") -> Alternative:
        attributes: dict[str, Any] = {}
        name = node
        if isinstance(node, ast.Call):
            if node.args or any(k.arg is None for k in node.keywords):
                raise self.fail(node, f"{ast.unparse(node)!r}", "attributes only: Gelu(approximate=…)")
            attributes = {str(k.arg): self.attribute(k.value) for k in node.keywords}
            name = node.func
        op = ast.unparse(name)
        if isinstance(name, ast.Attribute):
            op = "::".join(op.rsplit(".", 1))
        elif not isinstance(name, ast.Name):
            raise self.fail(node, f"{op!r} is called", "an operator's name")
        if op not in self.ops:
            known = [o.replace("::", ".") for o in self.ops]
            hint = UnknownNameError.among("operator", op.replace("::", "."), known)
            raise self.fail(node, f"unknown operator {op!r}", hint.expected, name=op)
        return Alternative(key or op.rsplit("::", 1)[-1], op, FrozenDict(attributes))

    def check(
        self, node: ast.Call, alternative: Alternative, operands: Sequence[Operand], names: Sequence[str]
    ) -> None:
        """Operand and output counts, and attribute names, against the vocabulary."""
        spec = self.ops[alternative.op]
        least = sum(not d.endswith(("?", "*")) for d in spec.inputs)
        for kind, declared, low, given in (
            ("operands", spec.inputs, least, len(operands)),
            ("outputs", spec.outputs, 1, len(names) or 1),
        ):
            high = None if declared and declared[-1].endswith("*") else len(declared)
            if given < low or (high is not None and given > high):
                span = f"at least {low}" if high is None else str(low) if low == high else f"{low} to {high}"
                raise self.fail(node, f"{given} {kind} for {alternative.op}", f"{span} ({', '.join(declared)})")
        last = len(spec.inputs) - 1
        for i, operand in enumerate(operands):
            if operand is None and i < len(spec.inputs) and not spec.inputs[i].endswith(("?", "*")):
                raise self.fail(node, f"None as {spec.inputs[i]!r} of {alternative.op}", "a value: it is not optional")
            if isinstance(operand, Input) and operand.optional and not spec.inputs[min(i, last)].endswith("?"):
                found = f"optional({operand.name}) as {spec.inputs[min(i, last)]!r} of {alternative.op}"
                raise self.fail(node, found, "an operand that the operator can do without")
        for name, value in alternative.attributes.items():
            if name not in spec.attributes:
                expected = UnknownNameError.among("attribute", name, spec.attributes).expected
                if name in [i.rstrip("?*") for i in spec.inputs]:
                    expected = f"an operand in its place: {alternative.op}({', '.join(spec.inputs)})"
                raise self.fail(node, f"{alternative.op} has no attribute {name!r}", expected, name=name)
            self.attributes.update(attribute_names(value))
        missing = [n for n, d in spec.attributes.items() if d == REQUIRED and n not in alternative.attributes]
        if missing:
            raise self.fail(node, f"{alternative.op} without {', '.join(missing)}", "what has no default")

    # --- values ------------------------------------------------------------------------------------------------

    def attribute(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            if not _NAME.match(node.id):
                raise self.fail(node, f"attribute name {node.id!r}", "letters, digits and underscores")
            return AttributeName(node.id)
        if isinstance(node, ast.Tuple) and any(isinstance(e, ast.Name) for e in node.elts):
            return tuple(self.attribute(e) for e in node.elts)
        value = self.literal(node)
        if value is None:
            raise self.fail(
                node, f"attribute value {ast.unparse(node)!r}", "a number, string, tuple, or attribute name"
            )
        return value

    def literal(self, node: ast.expr) -> Any:
        """A number, string, or flat tuple of them; None when the node is something else."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.literal(node.operand)
            return -value if isinstance(value, int | float) and not isinstance(value, bool) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
            return node.value
        if isinstance(node, ast.Tuple | ast.List):
            values = tuple(self.literal(e) for e in node.elts)
            return None if any(v is None or isinstance(v, tuple) for v in values) else values
        return None

    def operand(self, node: ast.expr) -> Operand:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "optional":
                return self.optional_input(node)
            return Output(self.call(node, ()))
        if isinstance(node, ast.Name):
            if not _NAME.match(node.id):
                raise self.fail(node, f"name {node.id!r}", "letters, digits and underscores, a letter first")
            if node.id in self.assigned:
                return self.assigned[node.id]
            self.inputs.setdefault(node.id)
            return Input(node.id)
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.Tuple) and any(isinstance(e, ast.Name) for e in node.elts):
            numbers = self.attribute(node)
            self.attributes.update(attribute_names(numbers))
            return Literal(numbers)
        value = self.literal(node)
        if value is None or any(isinstance(v, str) for v in (value if isinstance(value, tuple) else (value,))):
            raise self.fail(
                node, f"operand {ast.unparse(node)!r}", "a name, a call, a number, a tuple of numbers, or None"
            )
        return Literal(value)

    def optional_input(self, node: ast.Call) -> Input:
        """``optional(name)`` in the place of an operand."""
        name = node.args[0].id if len(node.args) == 1 and isinstance(node.args[0], ast.Name) else ""
        if not _NAME.match(name) or node.keywords or name in self.assigned:
            raise self.fail(node, f"operand {ast.unparse(node)!r}", "optional(input): an input that may be left out")
        self.inputs.setdefault(name)
        return Input(name, optional=True)

    # --- the whole ---------------------------------------------------------------------------------------------

    def finish(self, outputs: Sequence[str] | None) -> PatternGraph:
        read = {r for s in self.steps for r in s.reads}
        sinks = [n for n, o in self.assigned.items() if o not in read]
        outputs = sinks if outputs is None else outputs
        for name in outputs:
            if name not in self.assigned:
                hint = UnknownNameError.among("name", name, self.assigned)
                raise self.fail(None, f"output {name!r} is never assigned", hint.expected, name=name)
        for name in sinks:
            if name not in outputs:
                line = ast.Pass(lineno=self.steps[self.assigned[name].step].line, col_offset=0)
                raise self.fail(line, f"{name!r} is neither read nor an output", "every value used", name=name)
        if all(s.optional for s in self.steps):
            raise self.fail(None, "every step is optional", "at least one step that every match has")
        needed = {
            o.name for s in self.steps if not s.optional for o in s.operands if isinstance(o, Input) and not o.optional
        }
        needed |= {s.operands[0].name for s in self.steps if s.optional and isinstance(s.operands[0], Input)}
        steps = []
        for s in self.steps:
            own = [o.name for o in s.operands[1:] if isinstance(o, Input) and o.name not in needed]
            gates = tuple(own) if s.optional else ()
            choice = s.choice if s.choice in self.choices else ""
            if s.optional and not gates and not choice:  # nothing else says whether it is there
                choice = s.choice
                node = ast.Pass(lineno=s.line, col_offset=0)
                if not choice:
                    raise self.fail(node, "an optional step without a name", 'one, e.g. optional(Relu, "act")(…)')
                self.choose(node, choice, s.alternatives, True)
            steps.append(Step(s.index, s.outputs, s.alternatives, s.operands, s.optional, choice, gates, s.line))
        return PatternGraph(
            self.text,
            tuple(steps),
            tuple(self.inputs),
            FrozenDict({n: self.assigned[n] for n in outputs}),
            FrozenDict(self.choices),
            frozenset(self.attributes),
            frozenset(self.inputs) - needed,
        )
