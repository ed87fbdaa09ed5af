"""The few facts of an ELF file that the simulator needs: which variables a unit keeps in ``.bss``."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

_OBJECT = 1
_COMPILERS_OWN = ("completed.", "__odr_asan", "_ZGV")


@dataclass(frozen=True, slots=True)
class Variable:
    """An uninitialised variable.

    Attributes:
        symbol: as the linker knows it.
        offset: from ``__bss_start``.
        bytes: its size.
    """

    symbol: str
    offset: int
    bytes: int

    @property
    def local(self) -> bool:
        """Whether it is declared inside a function."""
        return self.symbol.startswith("_ZZ")

    @property
    def name(self) -> str:
        """As the source spells it: the last identifier of a mangled name (Itanium ABI: its length comes before it)."""
        lengths = r"(?<!\d)(\d+)(?=[A-Za-z_])"
        inner = (r"(?<=E)" + lengths,) if self.local else ()  # digits in the hash of a kernel's name are no lengths
        for pattern in (*inner, lengths):
            for found in re.finditer(pattern, self.symbol):
                end = found.end() + int(found[1])
                if re.fullmatch(r"(_\d+|_\d_)?E?", self.symbol[end:]):
                    return self.symbol[found.end() : end]
        return self.symbol


def uninitialised(data: bytes) -> tuple[Variable, ...]:
    """The variables in ``.bss`` of a 64-bit little-endian shared library, by offset."""
    headers, count, names = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, headers + 64 * i) for i in range(count)]
    strings = sections[names][4]
    index = next((i for i, s in enumerate(sections) if _text(data, strings + s[0]) == ".bss"), None)
    table = next((s for s in sections if s[1] == 2), None)  # SHT_SYMTAB
    if index is None or table is None:
        return ()
    base, text = sections[index][3], sections[table[6]][4]
    found = []
    start = base  # __bss_start lies before .bss where that is aligned
    for at in range(table[4], table[4] + table[5], 24):
        name, info, _, section, value, size = struct.unpack_from("<IBBHQQ", data, at)
        symbol = _text(data, text + name)
        if symbol == "__bss_start":
            start = value
        if section == index and info & 15 == _OBJECT and size and not symbol.startswith(_COMPILERS_OWN):
            found.append((symbol, value, size))
    return tuple(sorted((Variable(s, v - start, n) for s, v, n in found), key=lambda v: v.offset))


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode("ascii", "replace")
