"""The structures of ``shim/runtime/runtime.h`` and ``shim/fr_sim_model.h``, field by field."""

from __future__ import annotations

import ctypes as c

u8p, vp = c.POINTER(c.c_uint8), c.c_void_p
Three = c.c_uint32 * 3


class Parameter(c.Structure):
    _fields_ = [("kind", c.c_int), ("bytes", c.c_uint), ("pointee", c.c_uint)]


class Unit(c.Structure):
    _fields_ = [
        ("entry", vp),
        ("shared", vp),
        ("shared_bytes", c.c_uint64),
        ("dynamic", vp),
        ("dynamic_bytes", c.c_uint64),
        ("image", vp),
        ("image_bytes", c.c_uint64),
        ("parameters", c.POINTER(Parameter)),
        ("n_parameters", c.c_uint64),
    ]


class Buffer(c.Structure):
    _fields_ = [
        ("base", vp),
        ("bytes", c.c_uint64),
        ("mask", vp),
        ("writable", c.c_int),
        ("initialised", c.c_int),
        ("unwritten", c.c_uint64),
        ("first_unwritten", c.c_uint64),
    ]


class Copy(c.Structure):
    _fields_ = [
        ("entry", vp),
        ("shared", vp),
        ("shared_bytes", c.c_uint64),
        ("shared_mask", vp),
        ("dynamic", vp),
        ("image", vp),
        ("image_bytes", c.c_uint64),
    ]


BANKS = 32


class BankSite(c.Structure):
    _fields_ = [
        *((n, c.c_uint64) for n in ("pc", "instructions", "wavefronts", "ideal")),
        ("words", c.c_uint64 * BANKS),
    ]


class Request(c.Structure):
    _fields_ = [
        ("copies", c.POINTER(Copy)),
        ("args", c.POINTER(vp)),
        ("buffers", c.POINTER(Buffer)),
        *((n, c.c_uint32) for n in ("n_copies", "n_buffers", "workers")),
        *((n, Three) for n in ("grid", "block", "cluster")),
        *(
            (n, c.c_uint32)
            for n in (
                "dynamic_shared", "stack_bytes", "order", "seed", "checked", "races", "uninitialised", "banks",
                "cooperative", "programmatic", "timeout_ms", "sanitized",
            )
        ),
        ("sites", c.POINTER(BankSite)),
        ("n_sites", c.c_uint32),
    ]  # fmt: skip


class Where(c.Structure):
    _fields_ = [("thread", Three), ("block", Three), ("pc", c.c_uint64), ("line", c.c_int), ("file", c.c_char * 160)]


COUNTERS = ("switches", "barriers", "collectives", "mma", "async_bytes", "atomics", "reads", "writes", "spins", "waits")


class Result(c.Structure):
    _fields_ = [
        ("failed", c.c_int),
        ("detector", c.c_char * 32),
        ("message", c.c_char * 1024),
        ("buffer", c.c_int),
        ("offset", c.c_longlong),
        ("bytes", c.c_uint64),
        ("copy_image", c.c_uint64),
        ("at", Where),
        ("other", Where),
        ("has_at", c.c_int),
        ("has_other", c.c_int),
        *((n, c.c_uint64) for n in COUNTERS),
        ("n_banks", c.c_uint32),
    ]


def declare(library: c.CDLL) -> c.CDLL:
    """The runtime library with its functions' signatures."""
    library.frsim_launch.argtypes = [c.POINTER(Request), c.POINTER(Result)]
    library.frsim_guarded.argtypes = [c.c_uint64, c.c_uint64, c.POINTER(vp), c.POINTER(c.c_uint64)]
    library.frsim_guarded.restype = vp
    library.frsim_canary.argtypes = [vp, c.c_uint64]
    library.frsim_canary.restype = c.c_longlong
    library.frsim_release.argtypes = [vp, c.c_uint64]
    return library
