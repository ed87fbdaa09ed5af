"""What prepared launches are found by, beside layouts. Floor 6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLAIN = frozenset((str, int, bool))


def attributes_key(attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Attributes as a key: 1, 1.0 and True differ, so do 0.0 and -0.0, and NaN equals itself.

    What is no plain number or word goes by what it prints: binding will refuse it, or it is a scalar of NumPy.
    """
    return tuple(
        [
            (k, c := v.__class__, v if (c is float and v and v == v) or c in _PLAIN else repr(v))
            for k, v in attributes.items()
        ]
    )
