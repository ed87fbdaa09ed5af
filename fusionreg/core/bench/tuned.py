"""Parameters found best: looked up under the full environment, in the cache and in what plugins ship. Floor 7.

The runtime is handed a :class:`TunedParameters` and asks it once per layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..cache import Cache, cache_key
from ..compiler.nvrtc import version as nvrtc_version
from ..errors import FusionregError
from ..frozen import FrozenDict
from ..problem import Preferences, Problem, combinations
from ..proof.evidence import stripped
from ..render import render
from ..runtime.driver import driver
from ..runtime.kernels import device_target
from .shipped import ShippedParameters, problem_class

if TYPE_CHECKING:
    from ..registry.entries import FusionEntry, KernelEntry

#: Kind of cache entries, and the version of what they mean.
KIND, VERSION = "tuned", 1


def key_of(entry: FusionEntry, kernel: KernelEntry, problem: Problem, environment: Mapping[str, str]) -> str | None:
    """The cache's key; None where the kernel has no valid combination, or does not render."""
    first = next(combinations(kernel, problem), None)
    if first is None:
        return None
    try:
        source = render(entry, kernel, problem, first.params)
    except FusionregError:
        return None
    spec = kernel.spec
    space = [{k: list(v) for k, v in spec.params.items()}, spec.valid, dict(spec.constants), spec.grid, spec.block]
    digest = hashlib.sha256(f"{stripped(source.text)} {source.options}".encode()).hexdigest()
    return cache_key(
        {
            "version": str(VERSION),
            "kernel": kernel.key,
            "class": json.dumps(problem_class(problem), sort_keys=True, default=str),
            "space": json.dumps(space, sort_keys=True, default=str),
            "source": digest,
            "environment": json.dumps(dict(environment), sort_keys=True),
        }
    )


def kept(cache: Cache, key: str) -> Mapping[str, Any] | None:
    """An entry, whose ``params`` are a mapping; None where there is none, or a damaged one."""
    data = cache.get(KIND, key)
    try:
        found = None if data is None else json.loads(data)
        return found if found is not None and isinstance(found["params"], dict) else None
    except (ValueError, KeyError, TypeError):
        return None


def tuning_environment(facts: Mapping[str, str]) -> dict[str, str]:
    """What of an environment the speed of a kernel of ours depends on."""
    return {name: facts[name] for name in ("gpu", "target", "driver", "nvrtc") if name in facts}


def device_facts(device: int = 0) -> dict[str, str]:
    """The same facts of a device, from the driver; empty where there is none."""
    try:
        cuda = driver()
        if device >= cuda.device_count():  # which also starts the driver: names need that
            return {}
        return {
            "gpu": cuda.name(device),
            "target": device_target(device),
            "driver": cuda.version(),
            "nvrtc": nvrtc_version(),
        }
    except FusionregError:
        return {}


class TunedParameters:
    """Kernel key → parameters for problems of this class, and times: those found best on this GPU, else those that its
    plugin ships; asked by the runtime.

    Args:
        cache: where :func:`tune` keeps them.
        environment: device index → its facts, by the names of :func:`tuning_environment`.
    """

    def __init__(
        self, cache: Callable[[], Cache] = Cache, environment: Callable[[int], Mapping[str, str]] = device_facts
    ) -> None:
        self._cache, self._environment, self._shipped = cache, environment, ShippedParameters()

    def __call__(self, entry: FusionEntry, problem: Problem, device: int = 0) -> Preferences:
        shipped = self._shipped(entry, problem, device)
        cache = self._cache()
        if cache.path is None or not (cache.path / KIND).is_dir():  # nobody ever tuned: nothing to look up
            return shipped
        environment = tuning_environment(self._environment(device))
        if not environment:
            return shipped
        params, seconds = dict(shipped), {}
        for kernel in entry.kernels:
            key = key_of(entry, kernel, problem, environment)
            known = kept(cache, key) if key else None
            if known is not None:
                params[kernel.key] = FrozenDict(known["params"])
                if isinstance(known.get("ms"), float):
                    seconds[kernel.key] = known["ms"] * 1e-3
        return Preferences(params, seconds or shipped.seconds)  # times of one machine are not held against another's
