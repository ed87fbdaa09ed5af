"""Tuning: tried in a sensible order, checked before timed, decided the same way twice, kept under all that matters."""

from __future__ import annotations

from contextlib import contextmanager

import fake_gpu
import graphs as kit
import numpy as np
import plugin_kit
import pytest

from fusionreg.core.bench import Check, Entrant, Subject, tuning
from fusionreg.core.bench.tuning import KIND, TunedParameters, fill, key_of, order, problem_class, tune, winner
from fusionreg.core.cache import Cache
from fusionreg.core.errors import CompileError
from fusionreg.core.problem import combinations
from fusionreg.core.runtime import Runtime
from fusionreg.core.runtime.libraries import Place, library_of
from fusionreg.core.spec import Workload
from fusionreg.core.targets import target

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
        self.now = 0.0

    @contextmanager
    def trials(self, subject):
        yield self.entrant
        self.now += 1.0

    def entrant(self, kernel, params) -> Entrant:
        block = params["BLOCK"]

        def check() -> Check:
            self.log.append(f"check {block}")
            if block in self.broken:
                raise CompileError("cannot compile", "it", "too many registers")
            return Check(1.0 if block in self.wrong else 0.0, 0.1)

        def sample() -> list[float]:
            self.log.append(f"time {block}")
            return [self.times[block]] * 3

        return Entrant(kernel.name, True, check=check, sample=sample)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def test_the_fastest_is_kept(tmp_path, cache) -> None:
    subject = subject_of(made(tmp_path))
    (found,) = tune([subject], FakeTuner({64: 3.0, 128: 1.0, 256: 2.0}), cache)
    assert (found.params, found.ms, found.default_ms, found.tried, found.kept) == ({"BLOCK": 128}, 1.0, 3.0, 3, False)
    again = FakeTuner({})
    (known,) = tune([subject], again, cache)
    assert known.kept and known.params == {"BLOCK": 128} and again.log == []
    assert tune([subject], FakeTuner({64: 1.0, 128: 3.0, 256: 2.0}), cache, again=True)[0].params == {"BLOCK": 64}


def test_near_ties_go_to_the_first_of_the_spec(tmp_path, cache) -> None:
    assert winner({2: 1.0, 0: 1.009, 1: 1.02}) == 0 and winner({2: 1.0, 0: 1.011}) == 2
    subject = subject_of(made(tmp_path, blocks=(256, 64, 128)))
    assert tune([subject], FakeTuner({256: 1.005, 64: 1.0, 128: 1.001}), cache)[0].params == {"BLOCK": 256}


def test_wrong_numbers_never_win_and_are_never_timed(tmp_path, cache) -> None:
    tuner = FakeTuner({64: 1.0, 256: 2.0}, wrong=(64,), broken=(128,))
    (found,) = tune([subject_of(made(tmp_path))], tuner, cache)
    assert found.params == {"BLOCK": 256} and found.default_ms is None and found.reason
    assert [x for x in tuner.log if x.startswith("time")] == ["time 256"]
    (none,) = tune([subject_of(made(tmp_path / "b"))], FakeTuner({}, broken=(64, 128, 256)), cache, again=True)
    assert none.params == {} and "too many registers" in none.reason


def test_the_time_limit_and_kernels_without_a_choice(tmp_path, cache) -> None:
    catalog = made(tmp_path)
    both = [subject_of(catalog), subject_of(catalog, name="other", axes=ROW.axes | {"M": 999})]
    tuner = FakeTuner({64: 1.0, 128: 1.0, 256: 1.0})
    first, second = tune(both, tuner, cache, time_limit=0.5, clock=lambda: tuner.now)
    assert first.params and second.reason == "no time left" and not second.params
    assert tune([subject_of(made(tmp_path / "b", blocks=(64,)))], FakeTuner({}), cache) == ()


def test_what_the_key_tells_apart(tmp_path) -> None:
    catalog = made(tmp_path)
    entry = catalog["acme.add_relu"]
    kernel = entry.kernels[0]

    def key(facts=FACTS, **changes) -> str | None:
        return key_of(entry, kernel, subject_of(catalog, **changes).problem, facts)

    base = key()
    assert base and base == key(axes={"M": 40, "N": 256})  # the same power of two, a multiple of 8 too
    others = {
        key(axes={"M": 128, "N": 256}), key(axes={"M": 63, "N": 256}), key(dtypes={"T": "float16"}),
        key({**FACTS, "gpu": "another"}), key({**FACTS, "driver": "12.9"}), key({**FACTS, "nvrtc": "12.9"}),
    }  # fmt: skip
    assert len(others) == 6 and base not in others
    edited = made(tmp_path / "b", TEMPLATE.replace("fr::relu(", "fr::relu(0.0f + "))["acme.add_relu"]
    assert key_of(edited, edited.kernels[0], subject_of(catalog).problem, FACTS) != base
    wider = made(tmp_path / "c", blocks=(64, 128, 256, 512))["acme.add_relu"]
    assert key_of(wider, wider.kernels[0], subject_of(catalog).problem, FACTS) != base
    assert problem_class(subject_of(catalog).problem)["axes"] == {"M": (64, 8), "N": (256, 8)}


def test_the_occupancy_model(tmp_path) -> None:
    """16384 elements on 132 multiprocessors of 2048 threads: worked out by hand."""
    subject = subject_of(made(tmp_path, blocks=(1024, 32, 128)))
    kernel = subject.entry.kernels[0]
    candidates = list(combinations(kernel, subject.problem))
    device = target("sm_90a")
    share = {c.params["BLOCK"]: fill(c, device, 132) for c in candidates}
    assert share[1024] == pytest.approx(16 / (2 * 132))  # 16 blocks, two to a multiprocessor
    assert share[128] == pytest.approx(128 / (16 * 132))
    assert share[32] == pytest.approx(512 / (32 * 132) * 1.0)  # 32 blocks of a warp: half of the threads, enough
    assert [c.params["BLOCK"] for c in order(candidates, subject.problem, 132)] == [32, 1024, 128]
    roomy = made(tmp_path / "b", blocks=(128,), kernel_shared_memory="100000")
    one = next(combinations(roomy["acme.add_relu"].kernels[0], subject_of(roomy).problem))
    assert fill(one, device, 132) == pytest.approx(128 / (2 * 132) * 2 * 2 * 128 / 2048)  # two fit by memory


def test_an_estimate_comes_first(tmp_path) -> None:
    subject = subject_of(made(tmp_path, blocks=(32, 64, 128), kernel_estimate="1e-6 * (200 - BLOCK)"))
    candidates = list(combinations(subject.entry.kernels[0], subject.problem))
    assert [c.params["BLOCK"] for c in order(candidates, subject.problem, 132)] == [128, 64, 32]


def test_only_the_most_promising_and_the_present_one_are_tried(tmp_path, cache, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "TRIED", 1)
    tuner = FakeTuner(dict.fromkeys((1024, 32, 64), 1.0))
    (found,) = tune([subject_of(made(tmp_path, blocks=(1024, 32, 64)))], tuner, cache)
    assert found.tried == 2 and [x for x in tuner.log if "time" in x] == ["time 32", "time 1024"]


def array(*shape) -> np.ndarray:
    made = library_of(np.ndarray).allocator(shape, "float32", Place("cuda", 0))()
    made[...] = 0
    return made


def test_a_call_uses_what_was_tuned(tmp_path, cache, monkeypatch) -> None:
    library = fake_gpu.FakeLibrary()
    fake_gpu.install(monkeypatch, library)
    catalog = made(tmp_path)
    tune([subject_of(catalog)], FakeTuner({64: 3.0, 128: 2.0, 256: 1.0}), cache)
    tuned = TunedParameters(lambda: cache, lambda device: FACTS)

    def block(m: int, parameters) -> int:
        Runtime(catalog, "auto", cache, tuned=parameters).call("acme.add_relu", array(m, 256), array(256))
        return library.launches[-1].block[0]

    assert block(64, tuned) == 256 and block(56, tuned) == 256  # of one class
    assert block(4096, tuned) == 64  # of another, which nobody tuned
    assert block(64, {}) == 64  # frozen
    assert block(64, TunedParameters(lambda: cache, lambda device: {**FACTS, "gpu": "another"})) == 64
    assert block(64, TunedParameters(lambda: cache, lambda device: {})) == 64


def test_the_facts_of_a_device(monkeypatch) -> None:
    library = fake_gpu.FakeLibrary()
    fake_gpu.install(monkeypatch, library)
    monkeypatch.setattr(tuning, "driver", lambda: fake_gpu.Driver(library))
    monkeypatch.setattr(tuning, "device_target", lambda device: "sm_90a")
    found = tuning.device_facts()
    assert (found["gpu"], found["target"], found["driver"]) == ("Fake GPU", "sm_90a", "13.0") and found["nvrtc"]
    assert tuning.device_facts(1) == {}
    library.devices = 0
    assert tuning.device_facts() == {}


def test_nothing_is_looked_up_before_anybody_tuned(tmp_path, cache) -> None:
    def never(device):
        raise AssertionError("no driver is asked")

    subject = subject_of(made(tmp_path))
    assert TunedParameters(lambda: cache, never)(subject.entry, subject.problem) == {}


def test_a_damaged_entry_is_none(tmp_path, cache) -> None:
    subject = subject_of(made(tmp_path))
    key = key_of(subject.entry, subject.entry.kernels[0], subject.problem, FACTS)
    tuned = TunedParameters(lambda: cache, lambda device: FACTS)
    for data in (b"{", b"[]", b'{"ms": 1}', b'{"params": 7}'):
        cache.put(KIND, key, data)
        assert tuned(subject.entry, subject.problem) == {}
    cache.put(KIND, key, b'{"params": {"BLOCK": 999}}')  # no value of the spec: dispatch takes its own
    chosen = Subject.of(subject.entry, ROW, "sm_90a", OPS, tuned).selection.accepted[0]
    assert chosen.params == {"BLOCK": 64}


def test_the_simulator_asks_nobody(tmp_path, cache) -> None:
    def never(entry, problem, device):
        raise AssertionError("tuned parameters are of a GPU")

    y = Runtime(made(tmp_path), "sim", cache, tuned=never).call("acme.add_relu", np.ones((4, 8), "f"), np.ones(8, "f"))
    assert (y == 2).all()
