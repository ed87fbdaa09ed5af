"""The JSON of a ``.pt2`` → :class:`Program`: torch's export schema, read field by field, nothing of it evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Dim

from . import schemas, source, structure, symbols
from .program import (
    POSITIONS,
    SYMBOLIC,
    Call,
    InputSpec,
    Meta,
    NumberMeta,
    OutputSpec,
    Program,
    Ref,
    TensorMeta,
    check_target,
    substitute,
)
from .read_fx import REGIONS, least

#: Major version of the schema that this reader knows; minor versions only add optional fields.
SCHEMA_MAJOR = 8

_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 10: torch.complex64, 11: torch.complex128, 12: torch.bool, 13: torch.bfloat16, 28: torch.uint16,
    29: torch.float8_e4m3fn, 30: torch.float8_e5m2, 34: torch.uint32, 35: torch.uint64,
}  # fmt: skip
_MEMORY_FORMATS = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format,
}  # fmt: skip


class Malformed(ValueError):
    """The document departs from the schema."""


def read(document: Mapping[str, Any], weights: Mapping[str, torch.Tensor], whom: str) -> Program:
    """The program that a serialised ``ExportedProgram`` holds.

    Args:
        document: the parsed JSON.
        weights: parameters, buffers and constants by name.
        whom: the file, for messages.

    Raises:
        ModelError: another schema version, a malformed document, an operator outside aten, a missing weight.
    """
    version = document.get("schema_version") if isinstance(document, Mapping) else None
    major = version.get("major") if isinstance(version, Mapping) else None
    if major != SCHEMA_MAJOR:
        raise ModelError(
            "cannot load model", whom, f"export schema version {version}", f"major version {SCHEMA_MAJOR}",
            "Save it again with torch 2.8 or newer",
        )  # fmt: skip
    try:
        program = _Reader(whom).program(document["graph_module"], weights)
        return program.with_(ranges=FrozenDict(_ranges(document.get("range_constraints") or {})))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as e:
        raise ModelError(
            "cannot load model", whom, f"malformed graph ({type(e).__name__}: {e})", "torch's export schema"
        ) from e


def dtype_of(code: int) -> torch.dtype:
    """The dtype of a ``ScalarType`` code of the schema."""
    if code not in _DTYPES:
        raise Malformed(f"scalar type {code!r}")
    return _DTYPES[code]


def only(union: Mapping[str, Any]) -> tuple[str, Any]:
    """Kind and content of a tagged union."""
    filled = [(k, v) for k, v in union.items() if v is not None] if len(union) > 1 else list(union.items())
    if len(filled) != 1:
        raise Malformed(f"union {sorted(union)}")
    return filled[0]


def extent(size: Mapping[str, Any]) -> Dim:
    """An extent: an int, or the readable text of its expression."""
    kind, value = only(size)
    if kind == "as_int":
        return int(value)
    return symbols.readable(value["expr_str"])


def _ranges(table: Mapping[str, Any]) -> dict[str, tuple[int, int | None]]:
    found: dict[str, tuple[int, int | None]] = {}
    for name, bounds in table.items():
        low, high = bounds.get("min_val"), bounds.get("max_val")
        found[symbols.readable(name)] = least(int(low or 0)), int(high) if high is not None and high < 2**62 else None
    return found


class _Reader:
    def __init__(self, whom: str) -> None:
        self.whom = whom
        self.calls: list[Call] = []
        self.metas: dict[str, Meta] = {}

    def program(self, module: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Program:
        graph, signature = module["graph"], module["signature"]
        self._metas(graph, {})
        inputs = tuple(self._input(spec, weights) for spec in signature["input_specs"])
        self._nodes(graph["nodes"], {})
        outputs = tuple(self._output(spec) for spec in signature["output_specs"])
        roots = [entry["signature"] for entry in module["module_call_graph"] if entry["fqn"] == ""]
        root: Mapping[str, Any] = roots[0]
        calling = structure.from_json(root["in_spec"], self.whom)
        result = structure.from_json(root["out_spec"], self.whom)
        users = sum(i.kind in ("user", "literal") for i in inputs)
        returned = sum(o.kind == "user" for o in outputs)
        if calling.size != users or result.size != returned:
            raise Malformed(f"{users} inputs and {returned} outputs for structures of {calling.size} and {result.size}")
        names = tuple(root.get("forward_arg_names") or ())
        return Program(
            "model", inputs, outputs, tuple(self.calls), FrozenDict(self.metas), weights, calling, result, names
        ).check()

    def _metas(self, graph: Mapping[str, Any], names: Mapping[str, str]) -> None:
        for name, meta in graph["tensor_values"].items():
            strides = tuple(map(extent, meta["strides"])) if meta.get("layout") == 7 else None
            shape = tuple(map(extent, meta["sizes"]))
            described = TensorMeta(schemas.dtype_name(dtype_of(meta["dtype"])), shape, strides)
            self.metas.setdefault(names.get(name, name), described)
        for field, kind in (("sym_int_values", "int"), ("sym_float_values", "float"), ("sym_bool_values", "bool")):
            for name, number in (graph.get(field) or {}).items():
                tag, value = only(number)
                value = symbols.readable(value["expr_str"]) if tag == "as_expr" else value
                self.metas.setdefault(names.get(name, name), NumberMeta(kind, value))  # type: ignore[arg-type]

    def _input(self, spec: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> InputSpec:
        kind, body = only(spec)
        if kind == "constant_input":
            return InputSpec(
                body["name"], "literal", value=only(body["value"])[1] if "as_none" not in body["value"] else None
            )
        if kind == "user_input":
            argument = self.argument(body["arg"], {})
            if isinstance(argument, Ref):
                return InputSpec(argument.name, "user")
            return InputSpec("", "literal", value=argument)
        fields = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
        if kind not in fields:
            raise Malformed(f"input of kind {kind}")
        name, target = body["arg"]["name"], body[fields[kind]]
        if target not in weights:
            raise Malformed(f"no data for {target!r}")
        found, declared = weights[target], self.metas[name]
        if not isinstance(declared, TensorMeta) or (schemas.dtype_name(found.dtype), tuple(found.shape)) != (
            declared.dtype, declared.shape,
        ):  # fmt: skip
            raise Malformed(f"data of {target!r} is {found.dtype}{list(found.shape)}, the graph says {declared}")
        return InputSpec(name, "constant" if kind == "tensor_constant" else kind, target)  # type: ignore[arg-type]

    def _output(self, spec: Mapping[str, Any]) -> OutputSpec:
        kind, body = only(spec)
        if kind in ("user_output", "loss_output"):
            argument = body["arg"] if kind == "user_output" else {"as_tensor": body["arg"]}
            return OutputSpec("user", self.argument(argument, {}))
        if kind == "buffer_mutation":
            return OutputSpec("buffer", Ref(body["arg"]["name"]), body["buffer_name"])
        if kind == "user_input_mutation":
            return OutputSpec("input", Ref(body["arg"]["name"]), body["user_input_name"])
        raise Malformed(f"output of kind {kind}")

    def _nodes(self, nodes: list[Mapping[str, Any]], names: Mapping[str, str]) -> None:
        for node in nodes:
            target = node["target"]
            outputs = [names.get(n, n) for output in node["outputs"] for n in self._names(output)]
            if target.startswith("torch.ops.higher_order."):
                self._region(target.rsplit(".", 1)[1], node, outputs, names)
                continue
            metadata = node.get("metadata") or {}
            where = source.from_trace(
                metadata.get("stack_trace"), source.from_modules_text(metadata.get("nn_module_stack", ""))
            )
            target = check_target(target.removeprefix("torch.ops."), f"{self.whom} at {where}")
            values = [self.argument(item["arg"], names) for item in node["inputs"]]
            if target in SYMBOLIC:
                args = dict(zip(POSITIONS, values, strict=False))
            else:
                args = {item["name"]: value for item, value in zip(node["inputs"], values, strict=True)}
            self.calls.append(Call(target, FrozenDict(args), tuple(outputs), where))

    def _names(self, output: Mapping[str, Any]) -> list[str]:
        kind, body = only(output)
        match kind:
            case "as_tensor":
                return [body["name"]]
            case "as_tensors":
                return [t["name"] for t in body]
            case "as_sym_int" | "as_sym_float" | "as_sym_bool":
                return [body["as_name"]]
            case "as_none":
                return [""]
        raise Malformed(f"result of kind {kind}")

    def _region(self, kind: str, node: Mapping[str, Any], outputs: list[str], names: Mapping[str, str]) -> None:
        """Inlines a sub-graph that only switches autograd or autocast off around it."""
        if kind not in REGIONS:
            raise ModelError(
                "unsupported operator in", self.whom, f"higher-order operator {kind!r}", "a straight-line program",
                "Export a model without data-dependent control flow", operator=kind,
            )  # fmt: skip
        arguments = [item["arg"] for item in node["inputs"]]
        if kind == "wrap_with_autocast" and only(arguments[2])[1]:
            raise ModelError(
                "cannot load model", self.whom, "a region under an enabled autocast", "spelled-out casts",
                "Call run_decompositions({}) on the exported program before saving it",
            )  # fmt: skip
        at = REGIONS[kind]
        graph = arguments[at]["as_graph"]["graph"]
        feed = [self.argument(a, names) for a in arguments[at + 1 :]]
        label = outputs[0] if outputs else kind
        fields = ("tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values")
        own = {n: f"{label}.{n}" for field in fields for n in (graph.get(field) or {})}
        for slot, value in zip(graph["inputs"], feed, strict=True):
            tag, body = only(slot)
            if isinstance(value, Ref):
                own[body["name"] if tag == "as_tensor" else body["as_name"]] = value.name
        results = [self.argument(a, own) for a in graph["outputs"]]
        for ref, name in zip(results, outputs, strict=True):  # a result takes its outer name, unless it is an input
            if isinstance(ref, Ref) and ref.name not in {v.name for v in feed if isinstance(v, Ref)}:
                own = {k: (name if v == ref.name else v) for k, v in own.items()}
        self._metas(graph, own)
        self._nodes(graph["nodes"], own)
        for original, name in zip(graph["outputs"], outputs, strict=True):
            value = self.argument(original, own)
            if isinstance(value, Ref) and value.name != name:
                self.calls.append(Call("aten.alias.default", FrozenDict({"self": value}), (name,)))

    def argument(self, union: Mapping[str, Any], names: Mapping[str, str]) -> Any:
        """An argument in Python: references renamed by ``names``, lists as tuples."""
        kind, body = only(union)
        reader = _ARGUMENTS.get(kind)
        if reader is None:
            raise Malformed(f"argument of kind {kind}")
        return substitute(reader(body), names)


def _number(body: Mapping[str, Any]) -> Any:
    kind, value = only(body)
    if kind != "as_name":
        return value
    try:
        return float(value)  # a float in a symbolic slot is written as its text
    except ValueError:
        return Ref(value)


def _maybe_tensor(body: Mapping[str, Any]) -> Any:
    kind, value = only(body)
    return Ref(value["name"]) if kind == "as_tensor" else None


def _plain(*types: type) -> Callable[[Any], Any]:
    def read_plain(value: Any) -> Any:
        if not isinstance(value, types):
            raise Malformed(f"{value!r} is no {types[0].__name__}")
        return value

    return read_plain


def _list(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda body: tuple(of(item) for item in body)


_INT, _FLOAT, _BOOL, _STR = _plain(int), lambda v: float(v), _plain(bool), _plain(str)
_ARGUMENTS: Mapping[str, Callable[[Any], Any]] = FrozenDict(
    as_none=lambda body: None,
    as_tensor=lambda body: Ref(body["name"]),
    as_tensors=_list(lambda t: Ref(t["name"])),
    as_optional_tensor=_maybe_tensor,
    as_optional_tensors=_list(_maybe_tensor),
    as_int=_INT,
    as_ints=_list(_INT),
    as_float=_FLOAT,
    as_floats=_list(_FLOAT),
    as_bool=_BOOL,
    as_bools=_list(_BOOL),
    as_string=_STR,
    as_strings=_list(_STR),
    as_sym_int=_number,
    as_sym_ints=_list(_number),
    as_sym_float=_number,
    as_sym_floats=_list(_number),
    as_sym_bool=_number,
    as_sym_bools=_list(_number),
    as_scalar_type=dtype_of,
    as_memory_format=lambda code: _MEMORY_FORMATS[code],
    as_layout=lambda code: torch.strided if code == 7 else _refuse(f"layout {code}"),
    as_device=lambda body: torch.device(body["type"], body.get("index")) if body.get("index") is not None
    else torch.device(body["type"]),
)  # fmt: skip


def _refuse(what: str) -> Any:
    raise Malformed(what)
