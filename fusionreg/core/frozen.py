"""Deeply immutable containers: what specs, graphs and plans are made of. Floor 0."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(Mapping[K, V], Generic[K, V]):
    """An immutable, hashable, insertion-ordered mapping; equal to any mapping with the same items."""

    __slots__ = ("_hash", "_items")

    _items: dict[K, V]
    _hash: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "_items", dict(*args, **kwargs))
        object.__setattr__(self, "_hash", None)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("FrozenDict is immutable")

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    # The mixins of Mapping would do, several times slower: graphs ask these millions of times.
    def get(self, key: K, default: Any = None) -> Any:
        return self._items.get(key, default)

    def keys(self) -> KeysView[K]:
        return self._items.keys()

    def values(self) -> ValuesView[V]:
        return self._items.values()

    def items(self) -> ItemsView[K, V]:
        return self._items.items()

    def __hash__(self) -> int:
        known = self._hash
        if known is None:
            known = hash(frozenset(self._items.items()))
            object.__setattr__(self, "_hash", known)
        return known

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenDict):
            return self._items == other._items
        return self._items == other if isinstance(other, Mapping) else NotImplemented

    def __or__(self, other: Mapping[K, V]) -> FrozenDict[K, V]:
        return FrozenDict({**self._items, **other})

    def __reduce__(self):
        return FrozenDict, (self._items,)

    def __repr__(self) -> str:
        return f"FrozenDict({self._items!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from typing import get_args

        from pydantic_core import core_schema

        key, value = get_args(source) or (Any, Any)
        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.union_schema(
                [
                    core_schema.no_info_before_validator_function(
                        lambda v: dict(v) if isinstance(v, Mapping) else v,
                        core_schema.dict_schema(handler.generate_schema(key), handler.generate_schema(value)),
                    )
                ]
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )


EMPTY: FrozenDict[Any, Any] = FrozenDict()
