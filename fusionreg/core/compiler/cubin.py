"""What stands in a cubin: the bounds of its ELF file, and the resources that ptxas reports. Floor 5."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ..errors import CompileError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_NO_BITS = 8


@dataclass(frozen=True, slots=True)
class Resources:
    """Per-thread registers and local bytes, per-block static shared bytes, and spilled bytes (stores and loads)."""

    registers: int = 0
    shared: int = 0
    local: int = 0
    spills: int = 0


def expected_size(data: bytes) -> int:
    """Bytes that the file's own headers ask for; :class:`CompileError` when they are no 64-bit ELF header."""
    if len(data) < _HEADER.size or data[:5] != b"\x7fELF\x02":
        raise CompileError("cannot read", "cubin", f"{len(data)} bytes that begin {data[:5]!r}", "a 64-bit ELF file")
    ident = _HEADER.unpack_from(data)
    phoff, shoff = ident[5], ident[6]
    phentsize, phnum, shentsize, shnum = ident[9:13]
    end = max(_HEADER.size, phoff + phentsize * phnum, shoff + shentsize * shnum)
    for i in range(shnum):
        at = shoff + i * shentsize
        if at + _SECTION.size <= len(data):
            _, kind, _, _, offset, size, *_ = _SECTION.unpack_from(data, at)
            end = max(end, offset if kind == _NO_BITS else offset + size)
    for i in range(phnum):
        at = phoff + i * phentsize
        if at + _SEGMENT.size <= len(data):
            _, _, offset, _, _, size, *_ = _SEGMENT.unpack_from(data, at)
            end = max(end, offset + size)
    return end


def repaired(data: bytes) -> bytes:
    """The cubin with all its bytes. CuPy's ``getCUBIN`` takes the last one for a C string's end and drops it.

    The dropped byte is the last of the last program header's alignment, a small little-endian number: always zero.
    :class:`CompileError` when more is missing.
    """
    lacking = expected_size(data) - len(data)
    if lacking <= 0:
        return data
    if lacking == 1:
        return data + b"\0"
    raise CompileError(
        "cannot read",
        "cubin",
        f"{len(data)} bytes",
        f"{len(data) + lacking}",
        "The compiler's answer is cut short; try again",
    )


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def resources(log: str, entry: str) -> Resources:
    """What ``--ptxas-options=-v`` says of the kernel ``entry``; zeros where the log says nothing."""
    parts = _ENTRY.split(log)
    text = next((body for name, body in zip(parts[1::2], parts[2::2], strict=True) if name == entry), log)
    stack, used, shared = _STACK.search(text), _USED.search(text), _SHARED.search(text)
    return Resources(
        registers=int(used[1]) if used else 0,
        shared=int(shared[1]) if shared else 0,
        local=int(stack[1]) if stack else 0,
        spills=int(stack[2]) + int(stack[3]) if stack else 0,
    )


def section(data: bytes, name: str) -> bytes:
    """The bytes of a section; none where the file has no such section."""
    if len(data) < expected_size(data):
        return b""
    ident = _HEADER.unpack_from(data)
    shoff, shentsize, shnum, names_at = ident[6], ident[11], ident[12], ident[13]
    rows = [_SECTION.unpack_from(data, shoff + i * shentsize) for i in range(shnum)]
    names = data[rows[names_at][4] : rows[names_at][4] + rows[names_at][5]] if names_at < shnum else b""
    for row in rows:
        if names[row[0] : names.find(b"\0", row[0])] == name.encode():
            return data[row[4] : row[4] + row[5]]
    return b""


#: Operations: the low 9 bits of an instruction's 16 bytes, the same on every architecture since Volta.
_BARRIER, _NOTHING = 0x11D, 0x118


def instructions(data: bytes, entry: str) -> tuple[int, int]:
    """(instructions, barriers of the block among them) that the code of kernel ``entry`` holds, padding left out."""
    code = section(data, f".text.{entry}")
    words = [struct.unpack_from("<Q", code, at)[0] & 0x1FF for at in range(0, len(code) - 15, 16)]
    return len(words) - words.count(_NOTHING), words.count(_BARRIER)
