"""Where each line of a unit came from. Floor 4.

Marks are put into the template's own text by the Jinja lexer (``environment.py``) at every start of a line, so that
they survive blocks, loops, macros and includes; here they become ``#line`` directives or blank lines.
"""

from __future__ import annotations

import re
from functools import lru_cache

#: A mark is STX, file, ':', line, ETX: control characters that no template may hold and no whitespace rule touches.
MARK = re.compile("\x02([^\x03]*):(\\d+)\x03")
_LEADING = re.compile("(?:\x02[^\x03]*\x03)+")
_NOISE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|/\*.*\Z', re.S)
_RAW = re.compile(r'R"([^()\\ ]{0,16})\(.*?\)\1"|R"[^()\\ ]{0,16}\(.*\Z', re.S)

#: Gaps up to this many lines are filled with blank lines; larger ones, and steps back, take a directive.
_PADDING = 3


def mark(file: str, line: int) -> str:
    return f"\x02{file}:{line}\x03"


def strip(text: str) -> str:
    """The text without marks."""
    return MARK.sub("", text)


def directive(line: int, file: str) -> str:
    return f'#line {line} "{file}"'


@lru_cache(maxsize=64)  # the device library is the same text in every unit of a template
def resolve(text: str) -> str:
    """Marked text → text whose every line the compiler reports at its place in the template.

    A line without a mark of its own (one that an expression printed) counts as its predecessor. Directives are never
    put where they would change meaning: after a continued line, or inside a comment or a raw string.
    """
    out: list[str] = []
    at: tuple[str, int] | None = None  # where the compiler believes the next line of `out` stands
    origin: tuple[str, int] | None = None
    inside = False  # of a comment or a raw string that a line before opened
    continued = False
    pending: list[str] = []  # the text since the last line outside any comment
    for raw in text.split("\n"):
        found, line = _split(raw)
        if found:
            origin = found
        if origin is not None and origin != at and not inside and not continued and line.strip():
            gap = origin[1] - at[1] if at and at[0] == origin[0] else -1
            if 0 < gap <= _PADDING:
                out.extend([""] * gap)
            else:
                out.append(directive(origin[1], origin[0]))
            at = origin
        out.append(line)
        at = (at[0], at[1] + 1) if at else None
        continued = line.endswith("\\")
        if pending or "/*" in line or 'R"' in line:
            pending.append(line)
            inside = _open("\n".join(pending))
            if not inside:
                pending.clear()
    return "\n".join(out)


def _split(line: str) -> tuple[tuple[str, int] | None, str]:
    """Where a marked line comes from, and the line without marks.

    The innermost mark at its start tells (an include's own), else the first one in it.
    """
    at = line.find("\x02")
    if at < 0:
        return None, line
    if at == 0 and line.find("\x02", 1) < 0:  # as nearly every line is
        place, _, rest = line[1:].partition("\x03")
        file, _, number = place.rpartition(":")
        return (file, int(number)), rest
    start = _LEADING.match(line)
    found = list(MARK.finditer(start[0]))[-1] if start else MARK.search(line)
    return (found[1], int(found[2])) if found else None, MARK.sub("", line)


def _open(text: str) -> bool:
    """Whether the text ends inside a block comment or a raw string literal."""
    if "/*" not in text and 'R"' not in text:
        return False
    for found in _RAW.finditer(text):
        if not found[0].endswith('"') or ")" not in found[0]:
            return True
    rest = _RAW.sub('""', text)
    for found in _NOISE.finditer(rest):
        if found[0].startswith("/*") and not (len(found[0]) >= 4 and found[0].endswith("*/")):
            return True
    return False
