"""The nesting of a model's arguments and results, kept so that a fused callable takes and gives the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from fusionreg.core.errors import ArgumentError, ModelError

_PLAIN = {
    "builtins.tuple": "builtins.tuple",
    "builtins.list": "builtins.list",
    "builtins.dict": "builtins.dict",
    "collections.OrderedDict": "builtins.dict",
    "torch.fx.immutable_collections.immutable_list": "builtins.list",
    "torch.fx.immutable_collections.immutable_dict": "builtins.dict",
    "torch.Size": "builtins.tuple",
    "collections.namedtuple": "builtins.tuple",
}
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Structure:
    """A torch ``TreeSpec``; a None among the results is a leaf of it."""

    spec: Any

    @property
    def size(self) -> int:
        """How many leaves it has."""
        return self.spec.num_leaves

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The nested value with ``leaves`` at its leaves."""
        return pytree.tree_unflatten(list(leaves), self.spec)

    def flatten_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], whom: str
    ) -> list[Any]:
        """The leaves of a call, in the order of the program's user inputs.

        ``names``: positional parameter names, so that a caller may pass them by keyword as to the module.
        Raises:
            ArgumentError: an argument is missing, too many, or nested otherwise than at export.
        """
        positional, keyword = self.spec.children() if hasattr(self.spec, "children") else self.spec.children_specs
        expected = list(keyword.context or ())
        rest = dict(kwargs)
        values = list(args)
        for name in list(names)[len(values) : positional.num_children]:
            if name in rest and name not in expected:
                values.append(rest.pop(name))
        missing = [k for k in expected if k not in rest]
        extra = [k for k in rest if k not in expected]
        if missing or extra:
            found = "; ".join(p for p in (f"missing {missing}" * bool(missing), f"unknown {extra}" * bool(extra)) if p)
            raise ArgumentError(
                "bad call of", whom, found, f"keyword arguments {expected}", missing=missing, extra=extra
            )
        try:
            return self.spec.flatten_up_to((tuple(values), {k: rest[k] for k in expected}))
        except ValueError as e:
            raise ArgumentError("bad call of", whom, str(e), "arguments nested as at export") from e


def of(value: Any) -> Structure:
    """The structure of a value."""
    return Structure(pytree.tree_structure(value))


def from_json(text: str, whom: str) -> Structure:
    """The structure that ``text`` describes, built from plain containers alone.

    torch's own reader imports the module that an enum in the text names; here every node becomes a tuple, list or
    dict, so nothing is imported: a named tuple becomes a tuple, a class with named fields a dict of them.

    Raises:
        ModelError: the text is not a structure of the known protocol.
    """
    try:
        protocol, root = json.loads(text)
        if protocol != 1:
            raise ValueError(f"protocol {protocol!r}")
        plain = json.dumps([1, _plain(root, 0)])
        return Structure(pytree.treespec_loads(plain))
    except (ValueError, TypeError, KeyError, RecursionError, NotImplementedError) as e:
        raise ModelError("cannot read", whom, f"argument structure {text[:80]!r}: {e}", "a tree of protocol 1") from e


def _plain(node: Any, depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    kind, children = node["type"], node["children_spec"]
    if kind is None:
        return {"type": None, "context": None, "children_spec": []}
    below = [_plain(child, depth + 1) for child in children]
    keys = json.loads(node["context"]) if isinstance(node["context"], str) and node["context"] else None
    target = _PLAIN.get(kind)
    if target is None:  # a registered class: its fields when it lists them, else its children alone
        named = isinstance(keys, list) and len(keys) == len(below) and all(isinstance(k, str) for k in keys)
        target = "builtins.dict" if named else "builtins.tuple"
    if target == "builtins.dict":
        if not isinstance(keys, list) or len(keys) != len(below) or not all(isinstance(k, str | int) for k in keys):
            raise ValueError(f"keys {keys!r}")
        return {"type": target, "context": json.dumps(keys), "children_spec": below}
    return {"type": target, "context": json.dumps(None), "children_spec": below}
