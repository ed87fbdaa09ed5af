"""What workers of tests do: a module, so that their processes can import it."""

from __future__ import annotations

import os
from pathlib import Path


def square(x: int) -> int:
    return x * x


def environment(name: str, slowly: float = 0.2) -> str:
    import time

    time.sleep(slowly)  # long enough for every worker to get one
    return os.environ.get(name, "")


def dies_once(marker: str, x: int) -> int:
    """Ends its process, without a word, the first time that ``marker`` is not there."""
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return x
    os._exit(7)


def dies(x: int) -> int:
    if x == 1:
        os._exit(7)
    return x


def fails(x: int) -> int:
    raise ValueError(f"no {x}")
