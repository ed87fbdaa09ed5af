"""The disk cache: content-addressed, atomic, verified on every read, shared by any number of processes. Floor 5.

An entry is one file: the payload, then a footer with its metadata and a SHA-256 over key, payload and metadata. A
shared library stays loadable with a footer behind it, so the simulator's entries are used in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CacheError
from .frozen import EMPTY, FrozenDict
from .places import cache_directory

_MAGIC = b"fusionreg-cache1"
_TAIL = 8 + 32 + len(_MAGIC)
_TEMPORARY = ".tmp-"
#: Seconds after which a temporary file belongs to nobody, and between two marks of use of an entry.
_ABANDONED, _TOUCH = 600.0, 3600.0
_PRUNE_EVERY = 16
#: Seconds for which the room that is left in a folder is believed, where less than half of it has been written since.
_BELIEVED = 60.0
#: Folder and limit → when its entries were last counted, and how many bytes may be written before they are again.
_ROOM: dict[tuple[str, int], tuple[float, int]] = {}

DEFAULT_LIMIT = 4 << 30


class CacheWarning(UserWarning):
    """A cache entry was damaged, or the cache folder cannot be used; the work goes on without it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: its payload and what was noted beside it."""

    data: bytes = field(repr=False)
    meta: FrozenDict[str, Any] = EMPTY


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What a cache holds.

    Attributes:
        path: its folder, None when it lives in memory alone.
        reason: why it cannot be written, "" when it can.
        kinds: kind → (entries, bytes).
        oldest, newest: seconds since the entry least, most recently used was used; None when empty.
        limit: bytes above which the entries least recently used are removed.
    """

    path: Path | None
    reason: str
    kinds: FrozenDict[str, tuple[int, int]]
    oldest: float | None
    newest: float | None
    limit: int

    @property
    def entries(self) -> int:
        return sum(n for n, _ in self.kinds.values())

    @property
    def bytes(self) -> int:
        return sum(b for _, b in self.kinds.values())


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a key is not there: the nearest entry of the same name, and which parts of the key differ from it."""

    name: str
    nearest: str = ""
    differs: tuple[str, ...] = ()
    age: float = 0.0

    def __str__(self) -> str:
        if not self.nearest:
            return f"nothing is cached for {self.name}"
        if not self.differs:
            return f"the entry of {self.name} was damaged or removed"
        return f"the nearest entry of {self.name} ({self.age:.0f} s old) differs in {', '.join(self.differs)}"


def cache_key(parts: Mapping[str, str]) -> str:
    """The key of named parts: equal exactly when every part is."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()


class Cache:
    """A folder of entries by (kind, key). Nothing it meets on disk makes it raise: at worst it remembers in memory.

    Args:
        directory: its folder; None takes :func:`~fusionreg.core.places.cache_directory`.
        limit: bytes to keep; ``FUSIONREG_CACHE_SIZE`` (bytes; :class:`CacheError` for what is no number), else 4 GiB.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, limit: int | None = None) -> None:
        self.reason = ""
        self.path: Path | None = None
        self._memory: dict[tuple[str, str], Entry] = {}
        self._writes = 0
        self._warned = False
        self.limit = _limit() if limit is None else limit
        try:
            path = Path(directory) if directory is not None else cache_directory()
            path.mkdir(parents=True, exist_ok=True)
            self.path = path
        except OSError as e:
            self.reason = f"{e.strerror or e}: {e.filename or ''}".rstrip(": ")

    # ---- entries ----------------------------------------------------------------------------------------------------

    def get(self, kind: str, key: str) -> bytes | None:
        """The payload, or None."""
        found = self.entry(kind, key)
        return None if found is None else found.data

    def entry(self, kind: str, key: str) -> Entry | None:
        """Payload and metadata, or None; a damaged entry is a miss, with one warning, and is removed."""
        if (kind, key) in self._memory:
            return self._memory[kind, key]
        path = self._place(kind, key)
        if path is None:
            return None
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            raw, why = b"", e.strerror or str(e)
        else:
            why = "its digest does not match"
        found = _unpack(raw, key)
        if found is None:
            warnings.warn(f"cache entry {path} is damaged ({why}) and is made anew", CacheWarning, stacklevel=3)
            _remove(path)
            return None
        _touch(path)
        return found

    def file(self, kind: str, key: str) -> Path | None:
        """The file of a verified entry, whose first bytes are the payload; None when there is none on disk."""
        path = self._place(kind, key)
        return (
            path if path is not None and (kind, key) not in self._memory and self.entry(kind, key) is not None else None
        )

    def put(self, kind: str, key: str, data: bytes, meta: Mapping[str, Any] = EMPTY) -> None:
        """Stores an entry; readers see the old one or the new one, never a part.

        ``meta``: JSON values; ``name`` and ``parts`` (name → text) are what :meth:`explain_miss` compares.
        """
        path = self._place(kind, key)
        if path is None or self.reason:
            self._keep_in_memory(kind, key, data, meta)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f"{_TEMPORARY}{_host()}-{os.getpid()}-", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as f:
                    f.write(_pack(data, meta, key))
                os.chmod(temporary, 0o644)
                _replace(temporary, path)
            except BaseException:
                _remove(Path(temporary))
                raise
        except OSError as e:
            self.reason = f"{e.strerror or e}: {path.parent}"
            self._keep_in_memory(kind, key, data, meta)
            return
        self._memory.pop((kind, key), None)
        counted, room = _ROOM.get((str(self.path), self.limit), (0.0, 0))
        _ROOM[str(self.path), self.limit] = counted, room - len(data)
        if self._writes % _PRUNE_EVERY == 0:
            if room > 0 and time.monotonic() - counted < _BELIEVED:  # thousands of entries are not looked through again
                _swept(path.parent)
            else:
                self.prune()
        self._writes += 1

    def _keep_in_memory(self, kind: str, key: str, data: bytes, meta: Mapping[str, Any]) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the cache is kept in memory: {self.reason}", CacheWarning, stacklevel=4)
        self._memory[kind, key] = Entry(data, FrozenDict(meta))

    def _place(self, kind: str, key: str) -> Path | None:
        return None if self.path is None else self.path / kind / key[:2] / key

    # ---- housekeeping -----------------------------------------------------------------------------------------------

    def status(self) -> CacheStatus:
        """Counts and sizes by kind."""
        kinds: dict[str, tuple[int, int]] = {}
        ages: list[float] = []
        now = time.time()
        for kind, _, size, used in self._files():
            count, total = kinds.get(kind, (0, 0))
            kinds[kind] = count + 1, total + size
            ages.append(max(0.0, now - used))
        for (kind, _), held in self._memory.items():
            count, total = kinds.get(kind, (0, 0))
            kinds[kind] = count + 1, total + len(held.data)
        reason = self.reason or ("" if self.path is None or os.access(self.path, os.W_OK) else "it is not writable")
        return CacheStatus(
            self.path,
            reason,
            FrozenDict(sorted(kinds.items())),
            max(ages, default=None),
            min(ages, default=None),
            self.limit,
        )

    def clear(self, older_than: float | None = None, kind: str | None = None) -> tuple[int, int]:
        """Removes entries (not used for ``older_than`` seconds; of one kind); returns how many and their bytes."""
        removed, freed, now = 0, 0, time.time()
        for found, path, size, used in list(self._files()):
            if (kind is None or found == kind) and (older_than is None or now - used > older_than) and _remove(path):
                removed, freed = removed + 1, freed + size
        if older_than is None:
            self._memory = {k: v for k, v in self._memory.items() if kind is not None and k[0] != kind}
        self._sweep()
        return removed, freed

    def prune(self) -> int:
        """Removes entries least recently used until the rest is within the limit; returns how many."""
        self._sweep()
        files = sorted(self._files(), key=lambda f: f[3])
        total, removed = sum(f[2] for f in files), 0
        for _, path, size, _ in files:
            if total <= self.limit:
                break
            if _remove(path):
                removed += 1
            total -= size
        _ROOM[str(self.path), self.limit] = time.monotonic(), (self.limit - total) // 2
        return removed

    def explain_miss(self, kind: str, name: str, parts: Mapping[str, str]) -> Miss:
        """Why the key of ``parts`` is not there, by the nearest entry of the same ``name``."""
        best: tuple[int, float, str, tuple[str, ...]] | None = None
        for found, path, _, used in self._files():
            meta = _meta(path) if found == kind else None
            if meta is None or meta.get("name") != name:
                continue
            theirs = meta.get("parts", {})
            differs = tuple(sorted(k for k in {*parts, *theirs} if parts.get(k) != theirs.get(k)))
            best = min(best or (1 << 30, 0.0, "", ()), (len(differs), -used, path.name, differs))
        if best is None:
            return Miss(name)
        return Miss(name, best[2], best[3], time.time() + best[1])

    def _files(self) -> Iterator[tuple[str, Path, int, float]]:
        """(kind, path, bytes, time of last use) of every entry; what vanishes meanwhile is left out."""
        for kind in _listdir(self.path):
            for shard in _listdir(Path(kind.path)):
                for item in _listdir(Path(shard.path)):
                    try:
                        if not item.name.startswith(_TEMPORARY) and item.is_file(follow_symlinks=False):
                            info = item.stat(follow_symlinks=False)
                            yield kind.name, Path(item.path), info.st_size, info.st_mtime
                    except OSError:
                        continue

    def _sweep(self) -> None:
        """Removes temporary files whose writer is gone."""
        for kind in _listdir(self.path):
            for shard in _listdir(Path(kind.path)):
                _swept(Path(shard.path))

    def __repr__(self) -> str:
        return f"Cache({str(self.path)!r})"


def _limit() -> int:
    text = os.environ.get("FUSIONREG_CACHE_SIZE", "").strip()
    if not text:
        return DEFAULT_LIMIT
    if not re.fullmatch(r"[1-9]\d*", text):
        raise CacheError("bad cache size", "in FUSIONREG_CACHE_SIZE", repr(text), "a number of bytes, e.g. 4294967296")
    return int(text)


def _digest(key: str, data: bytes, meta: bytes) -> bytes:
    return hashlib.sha256(b"\0".join((key.encode(), str(len(data)).encode(), data, meta))).digest()


def _pack(data: bytes, meta: Mapping[str, Any], key: str) -> bytes:
    note = json.dumps(dict(meta), sort_keys=True, default=dict).encode()
    return b"".join((data, note, len(note).to_bytes(8, "little"), _digest(key, data, note), _MAGIC))


def _unpack(raw: bytes, key: str) -> Entry | None:
    if len(raw) < _TAIL or not raw.endswith(_MAGIC):
        return None
    length = int.from_bytes(raw[-_TAIL : -_TAIL + 8], "little")
    end = len(raw) - _TAIL - length
    if end < 0:
        return None
    data, note = raw[:end], raw[end : end + length]
    if _digest(key, data, note) != raw[-_TAIL + 8 : -len(_MAGIC)]:
        return None
    return Entry(data, FrozenDict(json.loads(note)))


def _meta(path: Path) -> dict[str, Any] | None:
    """The metadata of an entry, unverified and without its payload; None when it cannot be read."""
    try:
        with path.open("rb") as f:
            f.seek(-_TAIL, os.SEEK_END)
            tail = f.read()
            length = int.from_bytes(tail[:8], "little")
            if not tail.endswith(_MAGIC) or length > 1 << 20:
                return None
            f.seek(-_TAIL - length, os.SEEK_END)
            return json.loads(f.read(length))
    except (OSError, ValueError):
        return None


def _touch(path: Path) -> None:
    """Marks the use of an entry, seldom: reads of a shared cache should write nothing as a rule."""
    try:
        if time.time() - path.stat().st_mtime > _TOUCH:
            os.utime(path)
    except OSError:
        pass


def _replace(temporary: str, path: Path) -> None:
    try:
        os.replace(temporary, path)
    except (IsADirectoryError, PermissionError, OSError):
        if not path.is_dir():
            raise
        _remove(path)
        os.replace(temporary, path)


def _remove(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return True
    except OSError:
        return False


def _swept(folder: Path) -> None:
    for item in _listdir(folder):
        if item.name.startswith(_TEMPORARY) and _abandoned(item):
            _remove(Path(item.path))


def _listdir(path: Path | None) -> list[os.DirEntry[str]]:
    try:
        return [] if path is None else list(os.scandir(path))
    except OSError:
        return []


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _abandoned(item: os.DirEntry[str]) -> bool:
    try:
        if time.time() - item.stat().st_mtime > _ABANDONED:
            return True
        _, _, host, pid, *_ = f"-{item.name}".split("-")
        if host != _host():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False
