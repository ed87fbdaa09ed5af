"""A stand-in for the frontend of cuDNN: attention on the host, from what it is told of tensors and from addresses."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np

KINDS = {"HALF": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "FLOAT": np.float32}
__version__ = "1.32.0"
data_type = SimpleNamespace(**{name: name for name in KINDS})
heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
diagonal_alignment = SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right")
#: What was asked for: streams, workspaces, operations with their settings.
notes: list[tuple[str, object]] = []
#: Bytes that a plan takes; a text is why there is none.
plan: list[int | str] = [64]


def backend_version() -> int:
    return 91900


def create_handle() -> list[int]:
    notes.append(("handle", None))
    return [0]


def set_stream(*, handle: list[int], stream: int) -> None:
    handle[0] = stream


class _Tensor:
    def __init__(self, uid: int, dim: list[int] = (), stride: list[int] = (), kind: str = "") -> None:
        self.uid, self.dim, self.stride, self.kind, self.output = uid, dim, stride, kind, False

    def get_uid(self) -> int:
        return self.uid

    def set_output(self, output: bool) -> _Tensor:
        self.output = output
        return self

    def set_dim(self, dim: list[int]) -> _Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> _Tensor:
        self.stride = stride
        return self

    def set_data_type(self, kind: str) -> _Tensor:
        self.kind = kind
        return self

    def at(self, address: int) -> np.ndarray:
        kind = np.dtype(KINDS[self.kind])
        extent = 1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))
        raw = (ctypes.c_char * (extent * kind.itemsize)).from_address(address)
        strides = [s * kind.itemsize for s in self.stride]
        return np.ndarray(self.dim, kind, raw, strides=strides)


class pygraph:
    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle) -> None:
        assert (intermediate_data_type, compute_data_type) == ("FLOAT", "FLOAT") and io_data_type != "FLOAT"
        self.handle, self.tensors, self.steps = handle, [], []

    def tensor(self, *, name, dim, stride, data_type) -> _Tensor:
        self.tensors.append(_Tensor(len(self.tensors) + 100, dim, stride, data_type))
        return self.tensors[-1]

    def _results(self, count: int) -> list[_Tensor]:
        made = [_Tensor(len(self.tensors) + 100 + i) for i in range(count)]
        self.tensors += made
        return made

    def sdpa(self, *, name, q, k, v, generate_stats, **settings):
        notes.append(("sdpa", settings))
        y, *lse = self._results(1 + generate_stats)
        self.call = lambda at: self._forward(at, q, k, v, y, lse, settings)
        return [y, lse[0] if lse else None]

    def _weights(self, q, k, settings):
        scores = np.einsum("bhqd,bhkd->bhqk", q, k) * settings["attn_scale"]
        if "diagonal_band_right_bound" in settings:
            assert settings["diagonal_alignment"] == "top left" and settings["diagonal_band_right_bound"] == 0
            scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
        return scores

    def _forward(self, at, q, k, v, y, lse, settings):
        wide = [t.at(at[t.uid]).astype(np.float64) for t in (q, k, v)]
        group = wide[0].shape[1] // wide[1].shape[1]
        scores = self._weights(wide[0], wide[1].repeat(group, 1), settings)
        top = scores.max(-1, keepdims=True)
        total = np.exp(scores - top).sum(-1, keepdims=True)
        y.at(at[y.uid])[...] = np.exp(scores - top) / total @ wide[2].repeat(group, 1)
        for t in lse:
            t.at(at[t.uid])[...] = top + np.log(total)

    def validate(self) -> None:
        self.steps.append("validate")
        assert all(t.dim and t.kind for t in self.tensors)

    def build_operation_graph(self) -> None:
        self.steps.append("graph")

    def create_execution_plans(self, modes: list[str]) -> None:
        self.steps.append("plans")
        if isinstance(plan[0], str):
            raise RuntimeError(plan[0])

    def deselect_workspace_greater_than(self, most: int) -> None:
        self.most = most

    def check_support(self) -> None:
        assert self.steps == ["validate", "graph", "plans"]

    def build_plans(self) -> None:
        self.steps.append("built")

    def get_workspace_size(self) -> int:
        return plan[0]

    def execute(self, addresses: dict[int, int], workspace: int, handle: list[int]) -> None:
        assert self.steps[-1] == "built" and handle is self.handle
        notes.append(("execute", (workspace, handle[0])))
        self.call(addresses)
