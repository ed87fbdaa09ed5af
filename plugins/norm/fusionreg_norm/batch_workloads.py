"""What batch normalisation is measured on: the maps of ResNet-50, channels last, at 32 and 256 images."""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import Workload

#: (channels, extent of each of two spatial axes), of a normalisation alone and of one that ends a block.
_ALONE = ((256, 56), (64, 112), (64, 56), (128, 28), (256, 14), (512, 7))
_AFTER_ADDING = ((256, 56), (512, 28), (1024, 14), (2048, 7))


def workloads(words: str, maps: Sequence[str]) -> tuple[Workload, ...]:
    """Those of ``norm.<words>``, whose inputs ``maps`` are float16; parameters and statistics are float32."""
    sizes = _AFTER_ADDING if "add" in words else _ALONE
    largest = (256, *sizes[0])
    rows = [(n, *size, True) for n in (256, 32) for size in sizes] + [(*largest, False)]
    found = []
    for n, c, s, last in rows:
        goal = "best" if last and (n, c, s) == largest and words == "batchnorm_relu" else ""
        found.append(
            Workload(
                name=f"{n}x{c}x{s}x{s}-fp16-{'nhwc' if last else 'nchw'}",
                row="S22" if goal else "S22 more",
                axes={"N": n, "C": c, "S": s},
                batch=(s,),
                dtypes={"T": "float16", "P": "float32"},
                attributes={} if words.endswith("backward") else {"unbiased": 1},
                layouts=dict.fromkeys(maps, "channels_last") if last else {},
                goal=goal,
            )
        )
    return tuple(found)
