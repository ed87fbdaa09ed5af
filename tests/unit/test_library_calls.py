"""A kernel that calls a library: one among the others wherever kernels are listed, chosen, launched and proven."""

from __future__ import annotations

import json
from dataclasses import replace

import called
import fake_gpu
import numpy as np
import plugin_kit
import pytest

from fusionreg.core.cache import Cache
from fusionreg.core.compiler import compile_source
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.describe import text
from fusionreg.core.errors import ArgumentError, CompileError, LaunchError
from fusionreg.core.problem import Tensor, bind, select
from fusionreg.core.proof import evidence, repro
from fusionreg.core.proof.prove import prove
from fusionreg.core.proof.units import first_units
from fusionreg.core.registry.catalog import load
from fusionreg.core.registry.library_calls import LibraryCall, _code
from fusionreg.core.render import render
from fusionreg.core.runtime import Runtime
from fusionreg.core.runtime.libraries import Place, library_of
from fusionreg.core.spec import FusionSpec, KernelSpec
from fusionreg.hookspecs import hookimpl

NAME = "acme.add_relu"
KEYS = [f"{NAME}/library", f"{NAME}/plain"]


def spec_of(**changes) -> FusionSpec:
    fields = {"name": "library", "library": "acme.add_relu", "workspace": "4096", "estimate": "1e-9", **changes}
    plain = plugin_kit.add_relu(dtypes={"T": ("float16", "bfloat16", "float32")}, kernel_estimate="1e-6")
    return plain.model_copy(update={"kernels": (*plain.kernels, KernelSpec(**fields))})


def loaded(folder, *calls: LibraryCall, **changes):
    """A catalog of the fusion with both kernels, and the plugin's calls."""
    import sys

    made = plugin_kit.catalog(folder, {"k.cu.j2": plugin_kit.ADD_RELU}, plugin_kit.add_relu())
    name = made.plugins[0].module.partition(":")[0]
    module = next(m for n, m in sys.modules.items() if n.startswith("acme_kit_") and str(folder) in str(m.__file__))
    module.register_fusions = hookimpl(lambda: (spec_of(**changes),))
    module.register_library_calls = hookimpl(lambda: calls)
    assert name is not None
    return load(entry_points=(), extra_plugins=[("acme", module)])


@pytest.fixture
def call():
    return called.AddRelu()


@pytest.fixture
def catalog(tmp_path, call):
    made = loaded(tmp_path, call)
    assert not made.failures, made.failures
    return made


@pytest.fixture
def gpu(monkeypatch):
    library = fake_gpu.FakeLibrary()
    library.loaded = fake_gpu.install(monkeypatch, library)
    return library


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cubins"))


def array(*shape, seed=0):
    made = library_of(np.ndarray).allocator(shape, "float32", Place("cuda", 0))()
    made[...] = np.random.default_rng(seed).standard_normal(shape)
    return made


def address(a):
    return a.__array_interface__["data"][0]


# --- specs -------------------------------------------------------------------------------------------------------


def reasons(folder, *calls, **changes):
    made = loaded(folder, *calls, **changes)
    assert [k.name for k in made[NAME].kernels] == ["plain"]
    return "\n".join(f"{f.fusion} {f.field}: {f.reason}" for f in made.failures)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"library": "acme.add_rely"}, "library: bad spec"),
        ({"library": "acme.add_rely"}, "did you mean acme.add_relu"),
        ({"template": "k.cu.j2"}, "template: bad spec"),
        ({"grid": "1"}, "grid: bad spec"),
        ({"block": "1"}, "block: bad spec"),
        ({"params": {"A": (1, 2)}, "valid": "A == 1"}, "params: bad spec"),
        ({"shared_memory": "8"}, "shared_memory: bad spec"),
        ({"simulator": "it calls"}, "simulator: bad spec"),
        ({"requires": "Q > 1"}, "unknown name 'Q'"),
    ],
)
def test_what_a_library_kernel_cannot_have(tmp_path, call, changes, words):
    assert words in reasons(tmp_path, call, **changes)


def test_a_kernel_has_a_template_or_a_library(tmp_path, call):
    assert "template" in reasons(tmp_path, call, library="", grid="1", block="32")


def test_nobody_has_the_call(tmp_path):
    assert "unknown library call 'acme.add_relu' — there is none" in reasons(tmp_path)


def test_names_are_claimed_once_and_well_formed(tmp_path, call):
    twice = loaded(tmp_path / "twice", call, called.AddRelu())
    assert [f.stage for f in twice.failures] == ["claim"] and "registered twice" in twice.failures[0].reason
    assert len(twice[NAME].kernels) == 2
    odd = called.AddRelu()
    odd.name = "Acme"
    wrong = loaded(tmp_path / "odd", call, odd)
    assert [f.stage for f in wrong.failures] == ["validate"] and "'Acme'" in wrong.failures[0].reason
    other = loaded(tmp_path / "other", call, object())
    assert "answered with a object, not a LibraryCall" in other.failures[0].reason


def test_it_survives_json():
    spec = spec_of()
    assert FusionSpec.model_validate_json(spec.model_dump_json()) == spec


# --- one kernel among others -------------------------------------------------------------------------------------


def test_it_is_chosen_by_estimate_and_refuses_by_what_it_says(catalog):
    entry = catalog[NAME]

    def keys(n, **options):
        tensors = {"x": Tensor.contiguous("float16", (4, n)), "bias": Tensor.contiguous("float16", (n,))}
        return select(entry, bind(entry, tensors, {}, "sm_90a"), **options)

    assert [c.kernel.key for c in keys(8).accepted] == KEYS
    assert keys(8).accepted[0].launch.workspace == 4096
    found = keys(7)
    assert [c.kernel.key for c in found.accepted] == KEYS[1:] and str(found.refused[0]) == "library: odd columns"
    times = dict(zip(KEYS, (2.0, 1.0), strict=True))
    assert [c.kernel.key for c in keys(8, measured=times).accepted] == KEYS[::-1]


def test_a_call_launches_it(gpu, catalog, call, cache):
    runtime = Runtime(catalog, cache=cache)
    x, bias = array(2, 3, 8), array(8, seed=1)
    y = runtime.call(NAME, x, bias)
    assert np.array_equal(y, np.maximum(x + bias, 0)) and call.prepared == [(0, 4096)]
    ((pointers, scratch, stream),) = call.enqueued
    assert pointers == (address(x), address(bias), address(y)) and scratch % 256 == 0 and stream == 77
    assert not gpu.launches and runtime.kernels_used == {KEYS[0]: 1}
    runtime.call(NAME, array(2, 3, 8), bias)
    assert len(call.prepared) == 1 and len(call.enqueued) == 2


def test_bound_and_into_the_caller_s_output(gpu, catalog, call, cache):
    runtime = Runtime(catalog, cache=cache)
    x, bias, out = array(4, 8), array(8, seed=1), array(4, 8)
    bound = runtime.bind(NAME, x, bias, out=out)
    x *= 2
    bound()
    assert np.array_equal(out, np.maximum(x + bias, 0)) and bound.kernel == KEYS[0]
    assert call.enqueued[-1][0] == (address(x), address(bias), address(out)) and len(call.prepared) == 1


@pytest.mark.parametrize("why", ["missing", "no algorithm", "pending"])
def test_where_it_cannot_run_the_next_kernel_does(gpu, tmp_path, call, cache, why):
    call.gone = "libacme.so.7 is not installed" if why == "missing" else ""
    call.none = why == "no algorithm"
    runtime = Runtime(loaded(tmp_path, call, **({"pending": "new"} if why == "pending" else {})), cache=cache)
    runtime.call(NAME, array(4, 8), array(8))
    assert runtime.kernels_used == {KEYS[1]: 1} and len(gpu.launches) == 1 and not call.enqueued
    assert len(call.prepared) == (why == "no algorithm")


def test_without_another_kernel_the_reason_is_told(gpu, tmp_path, call, cache):
    call.gone = "libacme.so.7 is not installed"
    made = loaded(tmp_path, call)
    entry = made[NAME]
    alone = replace(made, fusions={NAME: replace(entry, kernels=(entry.kernel("library"),))})
    runtime = Runtime(alone, cache=cache)
    with pytest.warns(UserWarning, match=r"library: libacme\.so\.7 is not installed"):
        runtime.call(NAME, array(4, 8), array(8))


def test_in_a_capture_it_must_have_been_called_before(gpu, catalog, call, cache):
    runtime = Runtime(catalog, cache=cache)
    gpu.capturing = True
    with pytest.raises(LaunchError, match="captured into a CUDA graph"):
        runtime.call(NAME, array(4, 8), array(8))
    gpu.capturing = False
    runtime.call(NAME, array(4, 8), array(8))
    gpu.capturing = True
    runtime.call(NAME, array(4, 8), array(8), out=array(4, 8))
    assert len(call.prepared) == 1 and len(call.enqueued) == 2


def test_the_device_s_context_is_current(gpu, catalog, call, cache):
    seen = []
    prepare, launched = call.prepare, []
    call.prepare = lambda *a: (seen.append(gpu.contexts[-1]), prepare(*a))[1]
    gpu.devices = 2
    runtime = Runtime(catalog, cache=cache)
    gpu.contexts[:] = [555]
    call.enqueued = type("L", (list,), {"append": lambda self, v: launched.append(gpu.contexts[-1])})()
    runtime.call(NAME, array(4, 8), array(8))
    assert seen == [1000] and launched == [1000] and gpu.contexts == [555]


def test_the_simulator_refuses_it(catalog, call):
    entry = catalog[NAME]
    reason = "the simulator cannot execute it: it calls a library, acme.add_relu"
    assert SimExecutor().refusal(entry.kernel("library")) == reason
    runtime = Runtime(catalog, device="sim")
    x = np.ones((2, 4), np.float32)
    runtime.call(NAME, x, x[0])
    assert runtime.kernels_used == {KEYS[1]: 1} and not call.prepared


def test_a_proof_in_the_simulator_is_one_of_the_others(catalog):
    """All that it can execute has run, so the proof is whole; what is named and cannot is told."""
    report = prove(catalog, [NAME], device="sim")
    assert report.ok and {e.kernel for e in report.evaluations} == {"plain"}
    named = prove(catalog, [NAME], device="sim", kernels=["library"])
    assert not named.ok and named.unproven == (KEYS[0],)


def test_other_faults_of_the_library_are_raised(gpu, catalog, call, cache):
    def prepare(*arguments):
        raise LaunchError("cannot start", "the library", "it lost its device")

    call.prepare = prepare
    with pytest.raises(LaunchError, match="it lost its device"):
        Runtime(catalog, cache=cache).call(NAME, array(4, 8), array(8))


# --- proof -------------------------------------------------------------------------------------------------------


def test_there_is_nothing_to_compile(catalog, tmp_path):
    entry = catalog[NAME]
    kernel = entry.kernel("library")
    assert first_units(entry, kernel, "sm_90a") == []
    tensors = {"x": Tensor.contiguous("float16", (4, 8)), "bias": Tensor.contiguous("float16", (8,))}
    source = render(entry, kernel, bind(entry, tensors, {}, "sm_90a"), {})
    assert source.library == "acme.add_relu" and [a.parameter for a in source.arguments] == [
        "x", "bias", "y", "workspace",
    ]  # fmt: skip
    with pytest.raises(CompileError, match=r"it calls a library, acme\.add_relu"):
        compile_source(source)
    with pytest.raises(ArgumentError, match="there is no unit to write"):
        repro.write(catalog, NAME, "library", "float16-base", folder=tmp_path / "repro")


def test_the_digest_covers_the_call_s_code(catalog, monkeypatch):
    entry = catalog[NAME]
    kernel = entry.kernel("library")
    before = evidence.digest(entry, kernel)
    assert before == evidence.digest(entry, kernel) and before != evidence.digest(entry, entry.kernel("plain"))
    monkeypatch.setitem(kernel.library.__dict__, "digest", "other code")
    assert evidence.digest(entry, kernel) != before


def test_code_is_all_but_comments_and_docstrings():
    plain = 'def f(x):\n    return x + 1\n'
    assert _code('"""A module."""\n# why\ndef f(x):\n    """Adds."""\n    return x + 1  # one\n') == _code(plain)
    assert _code(plain.replace("1", "2")) != _code(plain)


def test_code_is_told_alike_by_every_python():
    """Evidence made by one version holds in another: nothing of the tree that only some of them have."""
    arguments = "arguments(args=[arg(arg='x', annotation=Name(id='int', ctx=Load()))])"
    value = "BoolOp(op=Or(), values=[Name(id='x', ctx=Load()), Constant()])"
    assert _code("def f(x: int):\n    return x or None\n") == (
        f"Module(body=[FunctionDef(name='f', args={arguments}, body=[Return(value={value})])])"
    )


def test_modules_beside_it_count(call):
    class More(called.AddRelu):
        modules = ("fake_gpu",)

    assert More().digest != call.digest == called.AddRelu().digest


def test_show_tells_what_is_called(catalog):
    rows = [line.split() for line in text(catalog[NAME]).partition("kernel library")[2].splitlines()]
    assert ["calls", "acme.add_relu"] in rows and ["workspace", "4096"] in rows
    assert not any(row[:2] == ["grid,", "block"] for row in rows[: rows.index(["kernel", "plain", "of", "acme:"])])


def test_evidence_keeps_the_library_s_version(tmp_path):
    rows = [
        evidence.Evidence("f/k", "d", "sm_90a", "gpu", "13", "13", "now", 1, 0, 0.0, 0.0, 1.0, library)
        for library in ("7.1", "")
    ]
    evidence.write(tmp_path / "e.json", rows[:1])
    assert evidence.read(tmp_path / "e.json") == rows[:1]
    evidence.write(tmp_path / "e.json", rows[1:])
    assert "library" not in json.loads((tmp_path / "e.json").read_text())["kernels"][0]
    assert evidence.read(tmp_path / "e.json") == rows[1:]
