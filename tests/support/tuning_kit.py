"""A fusion with one parameter, and a device that times it by a table."""

from __future__ import annotations

from contextlib import contextmanager

import graphs as kit
import plugin_kit

from fusionreg.core.bench import Check, Entrant, Subject
from fusionreg.core.errors import CompileError
from fusionreg.core.spec import Workload

OPS = kit.vocabulary()
FACTS = {"gpu": "Fake GPU", "target": "sm_90a", "driver": "13.0", "nvrtc": "13.0"}
TEMPLATE = """\
{{ signature }} {
  const long long i = blockIdx.x * (long long)BLOCK + threadIdx.x;  // i: [M N], row-major
  if (i >= M * N) return;
  y[i] = fr::from_float<T>(fr::relu(fr::to_float(x[i]) + fr::to_float(bias[i % N])));
}
"""
ROW = Workload(name="w", axes={"M": 64, "N": 256}, dtypes={"T": "float32"})


def made(folder, template: str = TEMPLATE, blocks=(64, 128, 256), **changes):
    fields = {
        "workloads": (ROW,), "kernel_params": {"BLOCK": blocks}, "kernel_block": "BLOCK",
        "kernel_grid": "ceildiv(M * N, BLOCK)",
    }  # fmt: skip
    return plugin_kit.catalog(folder, {"k.cu.j2": template}, plugin_kit.add_relu(**{**fields, **changes}))


def subject_of(catalog, **changes) -> Subject:
    workload = ROW.model_copy(update=changes)
    return Subject.of(catalog["acme.add_relu"], workload, "sm_90a", OPS)


class FakeTuner:
    target = "sm_90a"

    def __init__(self, times: dict[int, float], wrong: tuple[int, ...] = (), broken: tuple[int, ...] = ()) -> None:
        self.times, self.wrong, self.broken = times, wrong, broken
        self.environment = {**FACTS, "multiprocessors": "132", "torch": "2"}
        self.log: list[str] = []
        self.glances: dict[int, float] = {}
        self.deadly, self.dead = 0, False
        self.now = 0.0

    @contextmanager
    def trials(self, subject):
        yield self.entrant
        self.now += 1.0

    def lost(self) -> str:
        return "an illegal memory access" if self.dead else ""

    def entrant(self, kernel, params) -> Entrant:
        block = params["BLOCK"]

        def check() -> Check:
            self.log.append(f"check {block}")
            if self.dead or block == self.deadly:
                self.dead = True
                raise RuntimeError("CUDA error: an illegal memory access")
            if block in self.broken:
                raise CompileError("cannot compile", "it", "too many registers")
            return Check(1.0 if block in self.wrong else 0.0, 0.1)

        def sample() -> list[float]:
            self.log.append(f"time {block}")
            return [self.times[block]] * 3

        glance = (lambda: [self.glances[block]]) if self.glances else None
        return Entrant(kernel.name, True, check=check, sample=sample, glance=glance)
