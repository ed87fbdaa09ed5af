"""From a rendered unit to the text that the host compiler reads. Line numbers stay as they are."""

from __future__ import annotations

import re

_ALIGNMENT = r"(?:__align__|alignas|__attribute__)\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_DYNAMIC = re.compile(
    rf"\bextern\s+(?P<before>(?:volatile\s+|{_ALIGNMENT}\s*)*)__shared__\s+"
    rf"(?P<type>(?:{_ALIGNMENT}|[^;{{}}()\[\]=])*?)(?P<name>[A-Za-z_]\w*)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(r"\bstatic\s+__shared__\b|\b__shared__\s+static\b")
#: A `__device__` variable of a function without a value: it starts as 0, and is no shared memory.
_KEPT = re.compile(
    r"\b(?:static\s+__device__|__device__\s+static)\b(?P<what>(?:[^;{}()=,<>]|<[^;{}()=<>]*>)*[\w\]])\s*(?=;)"
)
_ALIGNED = re.compile(r"(\b__shared__\s+)alignas(\s*\()")
_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)


def host_text(text: str, entry: str, target: str) -> str:
    """The unit for the host: dynamic shared memory becomes a pointer, and the driver's entry point is added.

    ``target``: ``"sm_90a"`` defines ``__CUDA_ARCH__`` and ``FUSIONREG_ARCH`` as 900, and the feature macro of ``a``.
    """
    number = int(re.sub(r"\D", "", target) or 0)
    head = [f"#define __CUDA_ARCH__ {number}0", f"#define FUSIONREG_ARCH {number}0"]
    if target.endswith("a"):
        head.append(f"#define __CUDA_ARCH_FEAT_SM{number}_ALL 1")
    if target.endswith("f"):
        head.append(f"#define __CUDA_ARCH_FAMILY_SPECIFIC__ {number}0")
    return "\n".join((*head, '#line 1 "unit.cu"', _shared(text), f'#line 1 "driver"\nFRSIM_EXPORT({entry})', ""))


def _shared(text: str) -> str:
    """Rewrites declarations of shared memory outside comments and strings."""
    out: list[str] = []
    end = 0
    for noise in _NOISE.finditer(text):
        out += (_rewrite(text[end : noise.start()]), noise[0])
        end = noise.end()
    return "".join((*out, _rewrite(text[end:])))


def _rewrite(code: str) -> str:
    code = _STATIC.sub(lambda m: "\n" * m[0].count("\n") + "__shared__", code)
    code = _DYNAMIC.sub(_pointer, code)
    code = _KEPT.sub(lambda m: m[0] if "__shared__" in m["what"] else f"{m[0]} = {{}}", code)
    return _ALIGNED.sub(r"\1__align__\2", code)


def _pointer(found: re.Match[str]) -> str:
    kind = re.sub(_ALIGNMENT, " ", found["before"] + found["type"])
    kind, lines = " ".join(kind.split()), "\n" * found[0].count("\n")
    return f"static {kind}* const {found['name']} = reinterpret_cast<{kind}*>(frsim_dynamic);{lines}"
