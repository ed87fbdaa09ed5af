"""What batch normalisation is measured on: the maps of ResNet-50."""

from __future__ import annotations

from fusionreg.core.spec import Workload

#: (channels, extent of each of two spatial axes).
_MAPS = ((64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
_GOAL = (256, 256, 56)


def workloads(words: str) -> tuple[Workload, ...]:
    """Those of ``norm.<words>``: float16 maps, parameters and statistics in float32."""
    found = []
    for n, c, s in sorted(((n, *m) for n in (32, 256) for m in _MAPS), key=lambda m: m != _GOAL):
        goal = "best" if (n, c, s) == _GOAL and words == "batchnorm_relu" else ""
        found.append(
            Workload(
                name=f"{n}x{c}x{s}x{s}-fp16",
                row="S22" if goal else "S22 more",
                axes={"N": n, "C": c, "S": s},
                batch=(s,),
                dtypes={"T": "float16", "P": "float32"},
                attributes={} if words.endswith("backward") else {"unbiased": 1},
                goal=goal,
            )
        )
    return tuple(found)
