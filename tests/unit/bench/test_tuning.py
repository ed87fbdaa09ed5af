"""Tuning: tried in a sensible order, checked before timed, decided the same way twice, kept under all that matters."""

from __future__ import annotations

import fake_gpu
import numpy as np
import pytest
from tuning_kit import FACTS, OPS, ROW, TEMPLATE, FakeTuner, made, subject_of

from fusionreg.core.bench import Subject, tuning
from fusionreg.core.bench import tuned as lookup
from fusionreg.core.bench.shipped import problem_class
from fusionreg.core.bench.tuned import KIND, TunedParameters, key_of
from fusionreg.core.bench.tuning import order, tune, winner
from fusionreg.core.cache import Cache
from fusionreg.core.problem import Preferences, combinations, select
from fusionreg.core.runtime import Runtime
from fusionreg.core.runtime.libraries import Place, library_of
from fusionreg.core.spec import KernelSpec


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
    assert {x for x in tuner.log if x.startswith("time")} == {"time 256"}
    (none,) = tune([subject_of(made(tmp_path / "b"))], FakeTuner({}, broken=(64, 128, 256)), cache, again=True)
    assert none.params == {} and "too many registers" in none.reason


def test_the_time_limit_and_kernels_without_a_choice(tmp_path, cache) -> None:
    catalog = made(tmp_path)
    both = [subject_of(catalog), subject_of(catalog, name="other", axes=ROW.axes | {"M": 999})]
    tuner = FakeTuner({64: 1.0, 128: 1.0, 256: 1.0})
    first, second = tune(both, tuner, cache, time_limit=0.5, clock=lambda: tuner.now)
    assert first.params and second.reason == "no time left" and not second.params
    assert tune([subject_of(made(tmp_path / "b", blocks=(64,)))], FakeTuner({}), cache) == ()


def test_a_lost_device_ends_the_search(tmp_path, cache) -> None:
    catalog = made(tmp_path)
    both = [subject_of(catalog), subject_of(catalog, name="other", axes=ROW.axes | {"M": 999})]
    tuner = FakeTuner({64: 1.0, 128: 1.0, 256: 1.0})
    tuner.deadly = 128
    first, second = tune(both, tuner, cache)
    assert first.params == {} and "{'BLOCK': 128}: CUDA error" in first.reason and "illegal" in second.reason
    assert [x for x in tuner.log if "check" in x][-1] == "check 128"
    assert all(t.params and not t.kept for t in tune(both, FakeTuner({64: 1.0, 128: 2.0, 256: 2.0}), cache))


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


def test_an_estimate_comes_first(tmp_path) -> None:
    subject = subject_of(made(tmp_path, blocks=(32, 64, 128), kernel_estimate="1e-6 * (200 - BLOCK)"))
    candidates = list(combinations(subject.entry.kernels[0], subject.problem))
    assert [c.params["BLOCK"] for c in order(candidates, subject.problem, 132)] == [128, 64, 32]


def test_only_the_most_promising_and_the_present_one_are_tried(tmp_path, cache, monkeypatch) -> None:
    """So much shared memory leaves room for one block of 64, which the model puts last; dispatch takes it first."""
    monkeypatch.setattr(tuning, "TRIED", 1)
    catalog = made(tmp_path, blocks=(64, 1024, 32), kernel_shared_memory="200000 if BLOCK == 64 else 0")
    subject = subject_of(catalog, axes=ROW.axes | {"M": 2112})
    tuner = FakeTuner({64: 1.0, 1024: 2.0, 32: 0.5})
    (found,) = tune([subject], tuner, cache)
    assert found.tried == 2 and {x for x in tuner.log if "time" in x} == {"time 64", "time 1024"}
    assert found.params == {"BLOCK": 64} and found.model < 0.1


def test_the_fastest_at_a_glance_are_timed_in_full(tmp_path, cache, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "FINAL", 2)
    tuner = FakeTuner({64: 3.0, 128: 1.0, 256: 2.0, 512: 4.0})
    tuner.glances = {64: 9.0, 128: 2.0, 256: 1.0, 512: 8.0}
    (found,) = tune([subject_of(made(tmp_path, blocks=(64, 128, 256, 512)))], tuner, cache)
    assert found.tried == 4 and found.params == {"BLOCK": 128} and found.default_ms == 3.0
    assert {t.params["BLOCK"]: t.ms for t in found.trials} == tuner.glances
    assert all(0 < t.model <= 1 for t in found.trials)
    assert sorted(x for x in tuner.log if x.startswith("time")) == ["time 128", "time 256", "time 64"]


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


def two_kernels(folder):
    """The first by estimate has no choice; neither has the second."""
    kernels = tuple(
        KernelSpec(name=name, template="k.cu.j2", params={"BLOCK": (block,)}, block="BLOCK", estimate=seconds,
                   grid="ceildiv(M * N, BLOCK)")
        for name, block, seconds in (("first", 64, "1e-6"), ("second", 128, "2e-6"))
    )  # fmt: skip
    return made(folder, kernels=kernels)


def test_dispatch_takes_the_kernel_that_was_faster(tmp_path, cache) -> None:
    catalog = two_kernels(tmp_path)
    tuned = TunedParameters(lambda: cache, lambda device: FACTS)

    def picked(parameters=None) -> str:
        subject = Subject.of(catalog["acme.add_relu"], ROW, "sm_90a", OPS, parameters)
        return subject.chosen.kernel.spec.name

    assert picked() == "first"
    both = tune([subject_of(catalog)], FakeTuner({64: 2.0, 128: 1.0}), cache)
    assert [t.kernel for t in both] == ["acme.add_relu/first", "acme.add_relu/second"]
    assert picked(tuned) == "second" and picked() == "first"
    tune([subject_of(catalog)], FakeTuner({64: 1.0, 128: 2.0}), cache, again=True)
    assert picked(tuned) == "first"
    entry, problem = catalog["acme.add_relu"], subject_of(catalog).problem
    slow = {"acme.add_relu/first": 9.0, "acme.add_relu/second": 1.0}
    assert select(entry, problem, measured=slow, tuned=tuned(entry, problem)).accepted[0].kernel.spec.name == "second"


def test_a_time_says_nothing_about_kernels_that_nobody_timed(tmp_path) -> None:
    catalog = two_kernels(tmp_path)
    entry, problem = catalog["acme.add_relu"], subject_of(catalog).problem
    for times, first in (({"second": 1.0}, "first"), ({"first": 2.0, "second": 1.0}, "second"), ({}, "first")):
        tuned = Preferences({}, {f"acme.add_relu/{k}": v for k, v in times.items()})
        assert select(entry, problem, tuned=tuned).accepted[0].kernel.spec.name == first


def test_the_facts_of_a_device(monkeypatch) -> None:
    library = fake_gpu.FakeLibrary()
    fake_gpu.install(monkeypatch, library)
    monkeypatch.setattr(lookup, "driver", lambda: fake_gpu.Driver(library))
    monkeypatch.setattr(lookup, "device_target", lambda device: "sm_90a")
    found = lookup.device_facts()
    assert (found["gpu"], found["target"], found["driver"]) == ("Fake GPU", "sm_90a", "13.0") and found["nvrtc"]
    assert lookup.device_facts(1) == {}
    library.devices = 0
    assert lookup.device_facts() == {}


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
