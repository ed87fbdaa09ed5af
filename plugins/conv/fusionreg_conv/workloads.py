"""What the family is measured on: blocks of residual networks and their first layers, float16, channels last."""

from __future__ import annotations

from typing import Any

from fusionreg.core.spec import Workload

#: Name → (mode, N, C, extent of an image, K, extent of the kernel, stride, goal); padded to keep extents.
_Rows = dict[str, tuple[str, int, int, int, int, int, int, str]]
_RELU: _Rows = {
    "32x64x56-64-3x3": ("b", 32, 64, 56, 64, 3, 1, "cudnn"),
    "32x64x56-256-1x1": ("b", 32, 64, 56, 256, 1, 1, "0.0201"),
    "256x64x56-64-3x3": ("b", 256, 64, 56, 64, 3, 1, "0.9 * cudnn"),
    "256x256x56-64-1x1": ("b", 256, 256, 56, 64, 1, 1, "0.131"),
    "32x256x56-512-1x1-s2": ("b", 32, 256, 56, 512, 1, 2, "0.75 * cudnn"),
}
#: The layers of ResNet-50 behind the first one: name → C, extent of an image, K, extent of the kernel, stride. ``add``:
#: a residual is added before ReLU; ``alone``: nothing stands behind the normalization.
_LAYERS = {
    "64x56-64-1x1": (64, 56, 64, 1, 1), "64x56-64-3x3": (64, 56, 64, 3, 1), "64x56-256-1x1-add": (64, 56, 256, 1, 1),
    "256x56-64-1x1": (256, 56, 64, 1, 1), "256x56-128-1x1": (256, 56, 128, 1, 1),
    "128x56-128-3x3-s2": (128, 56, 128, 3, 2), "128x28-512-1x1-add": (128, 28, 512, 1, 1),
    "512x28-128-1x1": (512, 28, 128, 1, 1), "128x28-128-3x3": (128, 28, 128, 3, 1),
    "512x28-256-1x1": (512, 28, 256, 1, 1), "256x28-256-3x3-s2": (256, 28, 256, 3, 2),
    "256x14-1024-1x1-add": (256, 14, 1024, 1, 1), "1024x14-256-1x1": (1024, 14, 256, 1, 1),
    "256x14-256-3x3": (256, 14, 256, 3, 1), "1024x14-512-1x1": (1024, 14, 512, 1, 1),
    "512x14-512-3x3-s2": (512, 14, 512, 3, 2), "512x7-2048-1x1-add": (512, 7, 2048, 1, 1),
    "2048x7-512-1x1": (2048, 7, 512, 1, 1), "512x7-512-3x3": (512, 7, 512, 3, 1),
    "64x56-256-1x1-alone": (64, 56, 256, 1, 1), "256x56-512-1x1-s2-alone": (256, 56, 512, 1, 2),
    "512x28-1024-1x1-s2-alone": (512, 28, 1024, 1, 2), "1024x14-2048-1x1-s2-alone": (1024, 14, 2048, 1, 2),
}  # fmt: skip
#: Of detectors, whose SiLU stands in the slot behind the normalization.
_DETECTOR: _Rows = {
    "16x64x80-64-3x3": ("b", 16, 64, 80, 64, 3, 1, ""),
    "16x128x80-64-1x1": ("b", 16, 128, 80, 64, 1, 1, ""),
    "16x128x80-256-3x3-s2": ("b", 16, 128, 80, 256, 3, 2, ""),
    "16x3x640-32-3x3-s2": ("b", 16, 3, 640, 32, 3, 2, ""),
}
#: A first layer that no pool follows.
_FIRST: _Rows = {"32x3x224-32-3x3-s2": ("b", 32, 3, 224, 32, 3, 2, "")}


def _layers(alone: bool) -> _Rows:
    """Those of 32 and 256 images with or without what stands behind the normalization, but for what has a goal."""
    return {
        f"{n}x{name}": ("b", n, *layer, "")
        for n in (32, 256)
        for name, layer in _LAYERS.items()
        if name.endswith("-alone") == alone and f"{n}x{name}" not in _RELU
    }


def _folded(alone: bool) -> _Rows:
    """Some of 32 images, and of two, as exporters write them: the normalization is in the filters and the bias.
    ``alone``: without what stands behind them, so that both ways to fuse a layer are told apart by times of the same
    layer."""
    found: _Rows = {}
    for images, names in ((32, _FOLDED), (2, _FOLDED_FEW)):
        named = {n.removesuffix("-add") if alone else n: _LAYERS[n] for n in names if alone or not n.endswith("-alone")}
        found |= {f"{images}x{n}": ("b", images, *layer, "") for n, layer in named.items()}
    return found


_FOLDED = (
    "64x56-64-3x3", "64x56-256-1x1-add", "256x56-64-1x1", "128x28-128-3x3", "512x28-128-1x1", "256x14-256-3x3",
    "256x14-1024-1x1-add", "1024x14-256-1x1", "512x7-512-3x3", "512x7-2048-1x1-add", "64x56-256-1x1-alone",
    "512x28-1024-1x1-s2-alone",
)  # fmt: skip
_FOLDED_FEW = ("64x56-64-3x3", "64x56-256-1x1-add", "256x14-256-3x3", "1024x14-256-1x1", "512x7-512-3x3")

#: Layers of MobileNet, each channel by itself.
_DEPTHWISE: _Rows = {
    "32x144x56-depthwise-3x3": ("b", 32, 144, 56, 144, 3, 1, ""),
    "32x384x28-depthwise-5x5-s2": ("b", 32, 384, 28, 384, 5, 2, ""),
}
_POOL: _Rows = {
    "32x64x56-64-3x3": ("g", 32, 64, 56, 64, 3, 1, "0.020"),
    "32x128x28-128-3x3": ("g", 32, 128, 28, 128, 3, 1, "0.016"),
    "32x3x224-64-3x3": ("b", 32, 3, 224, 64, 3, 1, "0.060"),
}
#: The first layer of ResNet, and its pool.
_STEM: _Rows = {"32x3x224-64-7x7-s2": ("b", 32, 3, 224, 64, 7, 2, "0.060")}
_FOLDED_STEM: _Rows = {f"{n}x3x224-64-7x7-s2": ("b", n, 3, 224, 64, 7, 2, "") for n in (32, 2)}
_TWO = {"pool_h": 2, "pool_w": 2, "pool_stride_h": 2, "pool_stride_w": 2}
_THREE = {"pool_h": 3, "pool_w": 3, "pool_stride_h": 2, "pool_stride_w": 2} | dict.fromkeys(
    ("pool_top", "pool_left", "pool_bottom", "pool_right"), 1
)


def _made(
    rows: _Rows, row: str, pool: dict[str, int] | None, depthwise: bool = False, alone: bool = False,
    folded: bool = False,
) -> list[Workload]:
    found = []
    for name, (mode, n, c, extent, k, kernel, stride, goal) in rows.items():
        taps = {"R": kernel, "S": kernel}
        window = {"stride_h": stride, "stride_w": stride}
        window |= dict.fromkeys(("pad_top", "pad_left", "pad_bottom", "pad_right"), (kernel - 1) // 2)
        chosen: dict[str, Any] = {"activation": "Relu", "pool": "MaxPool", **pool} if pool else {}
        if depthwise:
            chosen["groups"] = c
        add = name.endswith("-add")
        absent = ("gamma", "beta", "mean", "var") if folded else ("bias",)
        found.append(
            Workload(
                name=name + (f"-pool{pool['pool_h']}" if pool else "") + ("-folded" if folded else ""),
                row=row,
                mode=mode,
                axes={"N": n, "C": c, "G": 1 if depthwise else c, "H": extent, "W": extent, "K": k, **taps},
                dtypes={"T": "float16", "B": "float32"},
                attributes={**window, **chosen},
                absent=absent if add or alone else (*absent, "residual"),
                layouts=dict.fromkeys(("x", "w", *(("residual",) if add else ())), "channels_last"),
                goal=goal,
            )
        )
    return found


def workloads(words: str) -> tuple[Workload, ...]:
    """Those of ``conv.<words>``."""
    if words == "conv_bn":
        folded = _made(_folded(alone=True), "S13 more", None, alone=True, folded=True)
        return (*_made({**_layers(alone=True), **_DETECTOR}, "S13 more", None, alone=True), *folded)
    if words == "conv_bn_relu":
        more = _made({**_layers(alone=False), **_FIRST}, "S13 more", None)
        more += _made(_folded(alone=False), "S13 more", None, folded=True)
        return (*_made(_RELU, "S13", None), *more, *_made(_DEPTHWISE, "S13 more", None, depthwise=True))
    return (
        *_made(_POOL, "S13", _TWO), *_made(_STEM, "S13", _THREE), *_made(_FOLDED_STEM, "S13 more", _THREE, folded=True)
    )  # fmt: skip
