"""What kernels of softmax say of their time, as expressions of the problem and of their parameters.

Two things limit a kernel that takes a row at once: its bytes, and how many rows are on the way at a time, each of which
lasts as long as its loads, sums and stores follow each other. A row costs the longer of both, and a part of the shorter
one. How many there are depends on the registers, so on VALUES.
"""

from __future__ import annotations

#: Bytes per second of the device, and of one multiprocessor.
_RATE, _OWN_RATE = "(4e12 if VEC > 1 else 8e11)", 1e11

#: Warps of a multiprocessor: VALUES of each lane are in registers, in the gradient those of two tensors.
_WARPS = {"forward": "min(48, 1280 // VALUES)", "backward": "min(40, 768 // VALUES)"}

#: Values of all warps' lanes that the registers of a multiprocessor hold.
_REGISTERS = {"forward": 1280, "backward": 768, "log_softmax backward": 1024}

#: Of what is read again by a kernel that reads twice, what is no longer in L2: {} are the bytes on the way at a time.
_GONE = {
    "": "min(1, {} / 64e6)",
    "log_softmax forward": "min(1, max(0, {} - 1e7) / 2.5e7)",
    "log_softmax backward": "min(0.4, {} / 64e6)",
}

#: Seconds of a row, and how much longer its parts wait for each other in a cluster.
_LATENCY, _MEETING = "(1.5e-6 + VALUES * 2e-8)", {"forward": 2.2e-6, "backward": 2e-7}

#: Of the shorter of both what is not hidden behind the longer one, and what more where the blocks of a cluster have a
#: multiprocessor each: nobody else is there while they wait for each other.
_EXPOSED, _ALONE = 0.2, 0.3


def _bytes(template: str, causal: bool) -> tuple[str, str]:
    """Of a row: read, written. Causal rows read what is visible, on average as much as the one in the middle."""
    seen = "min(max(Q / 2 + diagonal, 0), K)" if causal else "K"
    return f"{2 if template == 'backward' else 1} * {seen} * bits(T) / 8", "K * bits(T) / 8"


def _time(start: float, rows: str, latency: str, busy: str, held: str, exposed: str = str(_EXPOSED)) -> str:
    """``busy``: bytes of a row over the rate; ``held``: its latency over the rows of the device."""
    return f"{start} + {latency} + {rows} * (max({busy}, {held}) + {exposed} * min({busy}, {held}))"


def held(stem: str, template: str, rows: str, threads: str, causal: bool, start: float) -> str:
    """Of rows in registers: of LANES threads of each of SPREAD blocks of ``threads``."""
    read, written = _bytes(template, causal)
    blocks = f"max(1, {_WARPS[template]} // ({threads} // 32))"
    at_once = f"({blocks} * ({threads} // LANES) * multiprocessors)"
    exposed = f"({_EXPOSED} + {_ALONE} * (SPREAD > 1 and {blocks} == 1))"
    part = f"SPREAD * ({_LATENCY} + (SPREAD > 1) * {_MEETING[template]}) / {at_once}"
    latency = f"{_LATENCY} + ({read} + {written}) / SPREAD / {_OWN_RATE}"
    registers = _REGISTERS.get(f"{stem} {template}", _REGISTERS[template])
    spilled = f"max(1, {threads} // 32 * VALUES / {registers})"  # where not even one block has the registers
    return _time(start, rows, latency, f"({spilled} * ({read} + {written}) / {_RATE})", part, exposed)


def long(stem: str, template: str, rows: str, causal: bool) -> str:
    """Of rows that are read twice; the second time from L2 as long as all that are on the way fit there."""
    read, written = _bytes(template, causal)
    at_once = "(max(1, 48 // (THREADS // 32)) * multiprocessors)"
    again = f"{read} * {_GONE.get(f'{stem} {template}', _GONE['']).format(f'{at_once} * {read}')}"
    latency = f"1.8e-6 + ({read} + {written}) / {_OWN_RATE}"
    return _time(2.3e-6, rows, latency, f"(({read} + {again} + {written}) / {_RATE})", f"1.8e-6 / {at_once}")
