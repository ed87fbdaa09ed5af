"""What group fusions are measured on: maps of diffusion models, and of the decoder that makes pictures of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from fusionreg.core.spec import Workload

#: Fusion → (row, mode, shape, dtype, goal); 32 groups each.
_MAPS: Mapping[str, tuple[tuple[str, str, tuple[int, ...], str, str], ...]] = {
    "groupnorm_swish_dropout": (
        ("S17", "g", (2, 320, 128, 128), "float16", "0.014"),
        ("S17", "g", (2, 320, 128, 128), "float16 nhwc", "0.014"),
        ("S17", "g", (2, 1280, 32, 32), "float16 nhwc", "0.007"),
        ("S17", "b", (16, 512, 64, 64), "float16", "floor / 0.85"),
    ),
    "groupnorm_swish": (("S17", "b", (1, 128, 20, 256, 256), "bfloat16", "floor / 0.85"),),
    "swish_dropout": (("S17 more", "b", (16, 512, 64, 64), "float16", "floor / 0.8"),),
}

#: Channels and extent of the maps of SDXL; of its decoder.
_SDXL = ((320, 128), (640, 64), (1280, 32), (960, 128))
_DECODER = ((512, 256), (256, 512))

#: Bytes from which a tensor does not stay in the cache between launches, and has to be moved at 80 % of a copy's rate.
_LARGE = 64 << 20


def _more() -> tuple[tuple[str, str, tuple[int, ...], str, str], ...]:
    shapes = [((n, c, s, s), kind) for kind in ("float16", "float16 nhwc") for n in (2, 8) for c, s in _SDXL]
    shapes += [((1, c, s, s), kind) for kind in ("bfloat16", "bfloat16 nhwc") for c, s in _DECODER]
    large = [2 * prod(shape) >= _LARGE for shape, _ in shapes]
    return tuple(
        ("S17 more", "b" if is_large else "g", shape, kind, "floor / 0.8" if is_large else "")
        for (shape, kind), is_large in zip(shapes, large, strict=True)
    )


def workloads(words: str) -> tuple[Workload, ...]:
    """Those of ``norm.<words>``; where elements are dropped, one in ten is."""
    found = []
    for row, mode, shape, kind, goal in _MAPS.get(words, ()) + (_more() if words == "groupnorm_swish" else ()):
        dtype, *last = kind.split()
        n, c, s, *rest = shape
        short = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
        flat = words == "swish_dropout"
        found.append(
            Workload(
                name="-".join(["x".join(map(str, shape)), short, *last]),
                row=row,
                mode=mode,
                axes={"M": prod(shape[:-1]), "N": shape[-1]} if flat else {"N": n, "C": c, "S": s},
                batch=() if flat else tuple(rest),
                dtypes={"T": dtype},
                layouts={"x": "channels_last"} if last else {},
                attributes={**({} if flat else {"groups": 32}), **({"p": 0.1} if "dropout" in words else {})},
                goal=goal,
            )
        )
    return tuple(found)
