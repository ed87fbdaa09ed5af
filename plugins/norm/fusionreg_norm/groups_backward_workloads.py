"""What the gradients of group fusions are measured on: maps of diffusion models in training."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from fusionreg.core.spec import Workload

#: Fusion → (row, shape, layout, goal); half precision, 32 groups.
_MAPS: Mapping[str, tuple[tuple[str, tuple[int, ...], str, str], ...]] = {
    "groupnorm_swish_dropout_backward": (
        ("S17", (2, 320, 128, 128), "", "0.030"),
        ("S17", (16, 512, 64, 64), "", "floor / 0.80"),
        ("S17 more", (2, 320, 128, 128), "nhwc", ""),
        ("S17 more", (16, 512, 64, 64), "nhwc", ""),
        ("S17 more", (8, 320, 128, 128), "", ""),
    ),
    "groupnorm_swish_backward": (
        ("S17 more", (2, 640, 64, 64), "", ""),
        ("S17 more", (2, 1280, 32, 32), "", ""),
        ("S17 more", (2, 960, 128, 128), "", ""),
    ),
    "swish_dropout_backward": (("S17 more", (16, 512, 64, 64), "", "floor / 0.8"),),
}


def workloads(words: str) -> tuple[Workload, ...]:
    """Those of ``norm.<words>``, single launches; where elements are dropped, one in ten is."""
    found = []
    for row, shape, layout, goal in _MAPS[words]:
        flat = words == "swish_dropout_backward"
        n, c, *space = shape
        found.append(
            Workload(
                name="-".join(["x".join(map(str, shape)), "fp16", *([layout] if layout else [])]),
                row=row,
                axes={"M": prod(shape[:-1]), "N": shape[-1]} if flat else {"N": n, "C": c, "S": space[0]},
                batch=() if flat else tuple(space[1:]),
                dtypes={"T": "float16"},
                layouts=dict.fromkeys(("dy", "x"), "channels_last") if layout else {},
                attributes={**({} if flat else {"groups": 32}), **({"p": 0.1} if "dropout" in words else {})},
                goal=goal,
            )
        )
    return tuple(found)
