"""A ``.pt2`` file as an untrusted zip: names checked, sizes bounded, nothing unpacked to disk, nothing unpickled."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from fusionreg.core.errors import ModelError

#: torch writes its entries stored; a compressed one may blow up by this factor at most …
MAX_RATIO = 200
#: … unless it is small: below this many bytes the factor does not matter.
SMALL = 1 << 20
MAX_ENTRIES = 200_000
CHUNK = 1 << 24
MAX_JSON = 1 << 29


class Archive:
    """Read access to the entries of a ``.pt2``, by their name below the archive's root folder.

    Args:
        path: the file.

    Raises:
        ModelError: no zip, a name that leaves the archive or stands twice, more data than its size allows.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.whom = str(path)
        self._length = Path(path).stat().st_size if Path(path).is_file() else 0
        if not Path(path).is_file():
            raise ModelError("cannot load model", self.whom, "no such file", "a .pt2 file", path=self.whom)
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as e:
            raise self.error(f"not a readable zip archive ({e})", "a file written by torch.export.save") from e
        try:
            self._entries = self._index(self._zip.infolist())
        except BaseException:
            self._zip.close()
            raise

    def error(self, found: str, expected: str, next_step: str = "", **facts: object) -> ModelError:
        """A :class:`ModelError` about this file."""
        return ModelError("cannot load model", self.whom, found, expected, next_step, path=self.whom, **facts)

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> tuple[str, ...]:
        """Entry names below the root folder, sorted."""
        return tuple(sorted(self._entries))

    def read(self, name: str) -> bytearray:
        """The bytes of an entry, its checksum verified."""
        info = self._entries.get(name)
        if info is None:
            raise self.error(f"no entry {name!r}", f"one of {', '.join(self.names[:12])} …", entry=name)
        data = bytearray(info.file_size)  # read in place: weights are views of it
        try:
            with self._zip.open(info) as stream:
                filled = 0
                while filled < len(data) and (part := stream.read(min(CHUNK, len(data) - filled))):
                    data[filled : filled + len(part)] = part
                    filled += len(part)
                rest = stream.read(1)
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as e:
            raise self.error(
                f"entry {name!r} is damaged ({e})", "an intact file", "Save or copy the model again"
            ) from e
        if filled != info.file_size or rest:
            raise self.error(f"entry {name!r} does not have the size it states", f"{info.file_size} bytes", entry=name)
        return data

    def json(self, name: str) -> Any:
        """The parsed JSON of an entry."""
        if name in self._entries and self._entries[name].file_size > MAX_JSON:
            raise self.error(f"{name!r} has {self._entries[name].file_size} bytes", f"at most {MAX_JSON}", entry=name)
        try:
            return json.loads(self.read(name))
        except (ValueError, RecursionError) as e:
            raise self.error(f"{name!r} is no JSON ({type(e).__name__}: {e})", "a JSON document", entry=name) from e

    def _index(self, infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
        if len(infos) > MAX_ENTRIES:
            raise self.error(f"{len(infos)} entries", f"at most {MAX_ENTRIES}")
        files = [i for i in infos if not i.is_dir()]
        for info in files:
            self._check(info)
        roots = {PurePosixPath(i.filename).parts[0] for i in files}
        nested = len(roots) == 1 and all("/" in i.filename for i in files)
        entries: dict[str, zipfile.ZipInfo] = {}
        for info in files:
            name = info.filename.split("/", 1)[1] if nested else info.filename
            if name in entries:
                raise self.error(f"entry {name!r} stands twice", "unique names", entry=name)
            entries[name] = info
        return entries

    def _check(self, info: zipfile.ZipInfo) -> None:
        name = info.filename
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or "\\" in name or "\0" in name or ":" in parts[0] or ".." in parts:
            raise self.error(
                f"entry name {name!r}", "a relative path inside the archive", "Do not use this file", entry=name
            )
        if info.flag_bits & 1:
            raise self.error(f"entry {name!r} is encrypted", "plain entries", entry=name)
        if info.compress_size > self._length:
            raise self.error(f"entry {name!r} claims {info.compress_size} bytes of {self._length}", "an intact file")
        if info.file_size > max(SMALL, MAX_RATIO * info.compress_size):
            raise self.error(
                f"entry {name!r} claims {info.file_size} bytes from {info.compress_size}",
                f"an expansion of at most {MAX_RATIO}", "Do not use this file", entry=name,
            )  # fmt: skip


def check_nested(data: bytes | bytearray, whom: str) -> None:
    """The same checks for a zip inside the archive (weights that torch.save wrote)."""
    with zipfile.ZipFile(io.BytesIO(data)) as inner:
        for info in inner.infolist():
            if info.file_size > max(SMALL, MAX_RATIO * info.compress_size):
                found = f"{info.filename!r} claims {info.file_size} bytes from {info.compress_size}"
                raise ModelError("cannot load model", whom, found, f"an expansion of at most {MAX_RATIO}")
