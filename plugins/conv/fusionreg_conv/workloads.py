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
#: Further layers of ResNet-50 at 32 images.
_RELU_MORE: _Rows = {
    "32x128x28-128-3x3": ("b", 32, 128, 28, 128, 3, 1, ""),
    "32x256x14-256-3x3": ("b", 32, 256, 14, 256, 3, 1, ""),
    "32x512x7-512-3x3": ("b", 32, 512, 7, 512, 3, 1, ""),
    "32x1024x14-256-1x1": ("b", 32, 1024, 14, 256, 1, 1, ""),
    "32x2048x7-512-1x1": ("b", 32, 2048, 7, 512, 1, 1, ""),
    "32x128x56-128-3x3-s2": ("b", 32, 128, 56, 128, 3, 2, ""),
}
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
_TWO = {"pool_h": 2, "pool_w": 2, "pool_stride_h": 2, "pool_stride_w": 2}
_THREE = {"pool_h": 3, "pool_w": 3, "pool_stride_h": 2, "pool_stride_w": 2} | dict.fromkeys(
    ("pool_top", "pool_left", "pool_bottom", "pool_right"), 1
)


def _made(rows: _Rows, row: str, pool: dict[str, int] | None, depthwise: bool = False) -> list[Workload]:
    found = []
    for name, (mode, n, c, extent, k, kernel, stride, goal) in rows.items():
        taps = {"R": kernel, "S": kernel}
        window = {"stride_h": stride, "stride_w": stride}
        window |= dict.fromkeys(("pad_top", "pad_left", "pad_bottom", "pad_right"), (kernel - 1) // 2)
        chosen: dict[str, Any] = {"activation": "Relu", "pool": "MaxPool", **pool} if pool else {}
        if depthwise:
            chosen["groups"] = c
        found.append(
            Workload(
                name=f"{name}-pool{pool['pool_h']}" if pool else name,
                row=row,
                mode=mode,
                axes={"N": n, "C": c, "G": 1 if depthwise else c, "H": extent, "W": extent, "K": k, **taps},
                dtypes={"T": "float16", "B": "float32"},
                attributes={**window, **chosen},
                absent=("bias", "residual"),
                layouts={"x": "channels_last", "w": "channels_last"},
                goal=goal,
            )
        )
    return found


def workloads(words: str) -> tuple[Workload, ...]:
    """Those of ``conv.<words>``."""
    if words == "conv_bn_relu":
        more = (*_made(_RELU_MORE, "S13 more", None), *_made(_DEPTHWISE, "S13 more", None, depthwise=True))
        return (*_made(_RELU, "S13", None), *more)
    return (*_made(_POOL, "S13", _TWO), *_made(_STEM, "S13", _THREE)) if words == "conv_bn_relu_pool" else ()
