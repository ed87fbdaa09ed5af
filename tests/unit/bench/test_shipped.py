"""Parameters that plugins ship: found by class, trusted while the kernel is the same, told of when it is not."""

from __future__ import annotations

import json
import shutil

import plugin_kit
import pytest
from tuning_kit import FACTS, OPS, ROW, TEMPLATE, FakeTuner, made, subject_of

from fusionreg.core import doctor
from fusionreg.core.bench import Subject
from fusionreg.core.bench.shipped import ShippedParameters, kernel_digest, path_of, read, stale
from fusionreg.core.bench.tuned import TunedParameters
from fusionreg.core.bench.tuning import ship, tune
from fusionreg.core.cache import Cache
from fusionreg.core.errors import ModelError


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def shipped(catalog, cache, times=None):
    found = tune([subject_of(catalog)], FakeTuner(times or {64: 3.0, 128: 1.0, 256: 2.0}), cache, again=True)
    return ship(found, catalog, FACTS)


def version(catalog, folder, template=TEMPLATE, **changes):
    """The plugin's next version, which has the files of the one before."""
    after = made(folder, template, **changes)
    old, new = (c["acme.add_relu"].kernels[0].root for c in (catalog, after))
    if (old / "tuned").is_dir():
        shutil.copytree(old / "tuned", new / "tuned")
    return after


def asked(catalog, **changes):
    subject = subject_of(catalog, **changes)
    return ShippedParameters()(subject.entry, subject.problem)


def test_what_is_shipped_is_used(tmp_path, cache) -> None:
    catalog = made(tmp_path / "plugin")
    kernel = catalog["acme.add_relu"].kernels[0]
    assert asked(catalog) == {}
    (path,) = shipped(catalog, cache)
    assert path == path_of(kernel.root, "sm_90a") and path.parent.name == "tuned"
    (row,) = read(path).rows
    assert (row.kernel, row.workload, row.params, row.ms, row.default_ms) == (
        "acme.add_relu/plain", "w", {"BLOCK": 128}, 1.0, 3.0,
    )  # fmt: skip
    assert row.gpu == "Fake GPU" and row.digest == kernel_digest(kernel)
    assert asked(catalog) == {"acme.add_relu/plain": {"BLOCK": 128}}
    assert asked(catalog).seconds == {"acme.add_relu/plain": pytest.approx(1e-3)}
    assert asked(catalog, axes={"M": 40, "N": 256}) == {"acme.add_relu/plain": {"BLOCK": 128}}  # of one class
    assert asked(catalog, axes={"M": 4096, "N": 256}) == {} and asked(catalog, dtypes={"T": "float16"}) == {}
    chosen = Subject.of(catalog["acme.add_relu"], ROW, "sm_90a", OPS, ShippedParameters()).selection.accepted[0]
    assert chosen.params == {"BLOCK": 128}
    other = Subject.of(catalog["acme.add_relu"], ROW, "sm_80", OPS)
    assert ShippedParameters()(other.entry, other.problem) == {}


def test_another_part_of_the_architecture(tmp_path, cache) -> None:
    catalog = made(tmp_path / "plugin")
    shipped(catalog, cache)
    small = Subject.of(catalog["acme.add_relu"], ROW, "sm_90a", OPS, multiprocessors=114)
    assert ShippedParameters()(small.entry, small.problem) == {"acme.add_relu/plain": {"BLOCK": 128}}


def test_what_was_tuned_here_comes_first(tmp_path, cache) -> None:
    catalog = made(tmp_path / "plugin")
    shipped(catalog, cache)
    tune([subject_of(catalog)], FakeTuner({64: 3.0, 128: 2.0, 256: 1.0}), cache, again=True)
    subject = subject_of(catalog)
    here = TunedParameters(lambda: cache, lambda device: FACTS)
    assert here(subject.entry, subject.problem) == {"acme.add_relu/plain": {"BLOCK": 256}}
    assert here(subject.entry, subject.problem).seconds == {"acme.add_relu/plain": pytest.approx(1e-3)}
    elsewhere = TunedParameters(lambda: cache, lambda device: {**FACTS, "gpu": "another"})
    assert elsewhere(subject.entry, subject.problem) == {"acme.add_relu/plain": {"BLOCK": 128}}
    nobody = TunedParameters(lambda: Cache(tmp_path / "empty"), lambda device: FACTS)
    assert nobody(subject.entry, subject.problem) == {"acme.add_relu/plain": {"BLOCK": 128}}


def test_a_stale_row_is_ignored_and_told(tmp_path, cache) -> None:
    folder = tmp_path / "plugin"
    catalog = made(folder)
    shipped(catalog, cache)
    assert stale(catalog) == (1, [])
    same = version(catalog, folder, "// a comment\n" + TEMPLATE)
    assert stale(same) == (1, []) and asked(same)
    edited = version(catalog, folder, TEMPLATE.replace("fr::relu(", "fr::relu(0.0f + "))
    good, wrong = stale(edited)
    assert asked(edited) == {} and good == 0 and "acme.add_relu/plain on w for sm_90a" in wrong[0]
    wider = version(catalog, folder, blocks=(64, 128, 256, 512))
    assert asked(wider) == {} and len(stale(wider)[1]) == 1
    shipped(wider, cache, {64: 1.0, 128: 2.0, 256: 3.0, 512: 4.0})
    assert stale(wider) == (1, []) and asked(wider) == {"acme.add_relu/plain": {"BLOCK": 64}}


def test_includes_are_part_of_the_kernel(tmp_path) -> None:
    digests = set()
    for value in ("0.0f", "1.0f"):
        text = '{{ include("part.cuh") }}\n' + TEMPLATE.replace("fr::relu(", "fr::relu(ZERO + ")
        spec = plugin_kit.add_relu(
            kernel_params={"BLOCK": (64, 128)}, kernel_block="BLOCK", kernel_grid="ceildiv(M * N, BLOCK)"
        )
        files = {"k.cu.j2": text, "part.cuh.j2": f"#define ZERO {value}\n"}
        catalog = plugin_kit.catalog(tmp_path / value, files, spec)
        digests.add(kernel_digest(catalog["acme.add_relu"].kernels[0]))
    assert len(digests) == 2


def test_files_that_are_something_else(tmp_path, cache) -> None:
    catalog = made(tmp_path / "plugin")
    (path,) = shipped(catalog, cache)
    whole = path.read_text()
    for text in ("{", "[]", '{"target": 7}', whole.replace("fusionreg-tuned/1", "fusionreg-tuned/9")):
        path.write_text(text)
        assert asked(catalog) == {}
        with pytest.raises(ModelError, match="cannot read parameters"):
            read(path)
        assert stale(catalog)[0] == 0 and "cannot read parameters" in stale(catalog)[1][0]
    body = json.loads(whole)
    body["rows"][0]["params"] = {"BLOCK": 999}
    path.write_text(json.dumps(body))
    chosen = Subject.of(catalog["acme.add_relu"], ROW, "sm_90a", OPS, ShippedParameters()).selection.accepted[0]
    assert chosen.params == {"BLOCK": 64}  # no value of the spec: dispatch takes its own


def test_rows_of_other_classes_stay(tmp_path, cache) -> None:
    catalog = made(tmp_path / "plugin")
    shipped(catalog, cache)
    other = subject_of(catalog, name="big", axes=ROW.axes | {"M": 4096})
    (path,) = ship(tune([other], FakeTuner({64: 1.0, 128: 2.0, 256: 3.0}), cache), catalog, FACTS)
    assert {(r.workload, r.params["BLOCK"]) for r in read(path).rows} == {("w", 128), ("big", 64)}
    assert not list(path.parent.glob(".*"))


def test_doctor_tells(tmp_path, cache) -> None:
    catalog = made(tmp_path / "plugin")
    shipped(catalog, cache)
    assert "1 for kernels as they are" in doctor.shipped_parameters(catalog).found
    edited = version(catalog, tmp_path / "plugin", TEMPLATE.replace("fr::relu(", "fr::relu(0.0f + "))
    found = doctor.shipped_parameters(edited)
    assert found.status == "absent" and "acme.add_relu/plain on w" in found.found and "tune" in found.advice
