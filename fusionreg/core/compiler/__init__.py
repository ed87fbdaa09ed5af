"""Units → cubins, with no GPU: NVRTC, its resources, and the cache in front of it. Floor 5."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .. import headers
from ..cache import Cache, cache_key
from ..errors import CompileError, FusionregError
from . import nvrtc
from .cubin import Resources, expected_size, instructions, repaired, resources

if TYPE_CHECKING:
    from ..render import KernelSource

KIND = "cubin"

Observer = Callable[["ObjectCode"], Any]


@dataclass(frozen=True)
class ObjectCode:
    """One compiled kernel.

    Attributes:
        cubin: the ELF file.
        entry: C symbol of the kernel.
        kernel: ``fusion/kernel``.
        target: architecture by name.
        registers: per thread.
        shared: bytes of static shared memory per block.
        spills: bytes spilled to and reloaded from local memory.
        local: bytes of local memory per thread.
        log: the compiler's log; its lines point into the ``.cu.j2``.
        seconds: what compiling took, when it was compiled.
        nvrtc: version of the compiler.
        options: every option given to it.
        cached: whether it came from the cache.
        digest: the key it is cached under.
    """

    cubin: bytes = field(repr=False)
    entry: str
    kernel: str
    target: str
    registers: int
    shared: int
    spills: int
    local: int
    log: str = field(repr=False)
    seconds: float
    nvrtc: str
    options: tuple[str, ...]
    cached: bool
    digest: str


def key_parts(source: KernelSource) -> dict[str, str]:
    """The named parts of a cubin's cache key."""
    directories = headers.include_directories()
    return {
        "source": source.text,
        "options": " ".join(source.options),
        "arch": source.target,
        "nvrtc": nvrtc.version(),
        "headers": headers.digest(source.headers, directories),
    }


def compile_source(source: KernelSource, cache: Cache | None = None, observers: Iterable[Observer] = ()) -> ObjectCode:
    """The cubin of a unit, from the cache or from NVRTC.

    Args:
        source: the rendered unit.
        cache: where cubins are kept; None compiles always.
        observers: told of a kernel compiled here (not of a cache hit); what they raise is theirs alone.

    Raises: :class:`CompileError` with the log, mapped to the template; :class:`MissingDependencyError`.
    """
    if source.library:
        raise CompileError(
            "cannot compile", source.kernel, f"it calls a library, {source.library}", "a kernel with a template",
            arch=source.target, log="",
        )  # fmt: skip
    parts = key_parts(source)
    key = cache_key(parts)
    held = cache.entry(KIND, key) if cache is not None else None
    if held is not None:
        return ObjectCode(held.data, cached=True, digest=key, **_facts(held.meta["code"]))
    directories = headers.include_directories()
    headers.check([h for h in source.headers if h.startswith("cuda_")], directories, source.kernel)
    options = (*source.options, *(f"-I{d}" for d in directories))
    started = time.perf_counter()
    unit = source.text, f"{source.entry}.cu", source.target
    cubin, log = nvrtc.compile_unit(*unit, options, source.kernel)
    if not resources(log, source.entry).registers:  # from NVRTC's own cache, which keeps no log; launches go by it
        cubin, log = nvrtc.compile_unit(*unit, (*options, "--no-cache"), source.kernel)
    seconds = time.perf_counter() - started
    used = resources(log, source.entry)
    code = ObjectCode(
        cubin, source.entry, source.kernel, source.target, used.registers, used.shared, used.spills, used.local, log,
        seconds, parts["nvrtc"], source.options, False, key,
    )  # fmt: skip
    if cache is not None:
        facts = {k: v for k, v in asdict(code).items() if k not in ("cubin", "cached", "digest")}
        noted = {k: v if len(v) < 200 else cache_key({k: v}) for k, v in parts.items()}
        cache.put(KIND, key, cubin, {"name": source.kernel, "parts": noted, "code": facts})
    for observer in observers:
        observer(code)
    return code


def explain_miss(source: KernelSource, cache: Cache) -> str:
    """Why ``source`` is not in ``cache``, by the nearest cubin of the same kernel; "" when it is there."""
    parts = key_parts(source)
    if cache.get(KIND, cache_key(parts)) is not None:
        return ""
    noted = {k: v if len(v) < 200 else cache_key({k: v}) for k, v in parts.items()}
    return str(cache.explain_miss(KIND, source.kernel, noted))


def compile_all(
    sources: Sequence[KernelSource], cache: Cache | None = None, observers: Iterable[Observer] = (), workers: int = 4
) -> list[ObjectCode | FusionregError]:
    """Many units at once, in threads (NVRTC drops the interpreter's lock); an error stands in its unit's place."""
    told = tuple(observers)

    def one(source: KernelSource) -> ObjectCode | FusionregError:
        try:
            return compile_source(source, cache, told)
        except FusionregError as e:
            return e

    with ThreadPoolExecutor(max(1, min(workers, len(sources)))) as pool:
        return list(pool.map(one, sources))


def _facts(noted: Any) -> dict[str, Any]:
    return {**noted, "options": tuple(noted["options"])}


__all__ = [
    "KIND", "ObjectCode", "Resources", "compile_all", "compile_source", "expected_size", "explain_miss", "instructions",
    "key_parts", "repaired", "resources",
]  # fmt: skip
