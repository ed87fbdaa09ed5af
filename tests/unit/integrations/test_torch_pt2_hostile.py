"""``.pt2`` files as untrusted input: nothing of them runs, whatever they hold."""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile

import pytest
import torch
from pt2_files import GRAPH, SAMPLES, WEIGHTS, Payload, check_values, edited, write
from torch import nn

from fusionreg.core.errors import ModelError
from fusionreg.integrations.torch import export, import_pt2, load_pt2, pt2, reference
from fusionreg.integrations.torch.schemas import callable_safely


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Entries of a saved model with a symbolic batch: a linear layer and a buffer."""
    path = tmp_path_factory.mktemp("pt2") / "m.pt2"
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    torch.manual_seed(0)
    ep = export(module, (torch.randn(2, 4),), None, ({0: torch.export.Dim.AUTO},))
    torch.export.save(ep, path)
    with zipfile.ZipFile(path) as z:
        return {n.split("/", 1)[1]: z.read(n) for n in z.namelist()}, module


# -- nothing runs --------------------------------------------------------------------------------------------


def test_sample_inputs_are_never_unpickled(saved, tmp_path):
    """torch.export.load runs this; here the model loads and the command does not run."""
    entries, module = saved
    evil = pickle.dumps(Payload(tmp_path / "ran"))
    path = write(tmp_path / "m.pt2", {**entries, SAMPLES: evil})
    check_values(path, module)
    assert not (tmp_path / "ran").exists()
    pickle.loads(evil)
    assert (tmp_path / "ran").exists()  # the payload works: it was the loader that left it alone


@pytest.mark.parametrize("where", ["weight", "legacy state", "custom object"])
def test_pickled_weights_do_not_run(where, saved, tmp_path):
    entries, _ = saved
    buffer = io.BytesIO()
    torch.save({"0.weight": Payload(tmp_path / "ran")}, buffer)
    if where == "legacy state":
        entries = {k: v for k, v in entries.items() if k != WEIGHTS} | {"data/weights/model.pt": buffer.getvalue()}
    else:

        def change(table):
            meta = table["config"]["0.weight"]
            meta["use_pickle"] = True
            meta["tensor_meta"] = None if where == "custom object" else meta["tensor_meta"]

        entries = edited(entries, WEIGHTS, change) | {"data/weights/weight_0": buffer.getvalue()}
    with pytest.raises(ModelError):
        import_pt2(write(tmp_path / "m.pt2", entries))
    assert not (tmp_path / "ran").exists()


def test_symbolic_expressions_are_not_evaluated(saved, tmp_path):
    """torch hands them to sympy's eval."""
    entries, _ = saved
    code = f"__import__('os').mkdir({str(tmp_path / 'ran')!r})"

    def change(document):
        for meta in document["graph_module"]["graph"]["tensor_values"].values():
            for size in meta["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = code

    with pytest.raises(ModelError, match="symbolic extent"):
        import_pt2(write(tmp_path / "m.pt2", edited(entries, GRAPH, change)))
    assert not (tmp_path / "ran").exists()


def test_argument_structures_import_nothing(saved, tmp_path, monkeypatch):
    """torch imports the module that an enum in a structure names."""
    entries, _ = saved
    (tmp_path / "evil_pt2_module.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    context = json.dumps([{"__enum__": True, "fqn": "evil_pt2_module:E", "name": "A"}])

    def change(document):
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        protocol, tree = json.loads(signature["out_spec"])
        leaf = {"type": None, "context": None, "children_spec": []}
        signature["out_spec"] = json.dumps(
            [protocol, {"type": "builtins.dict", "context": context, "children_spec": [leaf]}]
        )
        assert tree is not None

    with pytest.raises(ModelError):
        import_pt2(write(tmp_path / "m.pt2", edited(entries, GRAPH, change)))
    assert not (tmp_path / "ran").exists() and "evil_pt2_module" not in sys.modules


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.from_file.default", "torch.ops.aten._print.default", "os.system", "builtins.eval",
        "torch.load", "torch.hub.load", "math.__loader__", "_operator.call", "torch.ops.mylib.evil.default",
        "torch.ops.higher_order.cond", "#custom:thing", "torch.ops.aten.add", "torch.ops.aten.__init__.default",
        "torch.ops.aten.relu.default.__globals__",
    ],
)  # fmt: skip
def test_foreign_operators_are_refused(target, saved, tmp_path):
    """Neither converted nor run by the reference: only overloads of aten and prims that compute."""
    entries, _ = saved

    def change(document):
        node = document["graph_module"]["graph"]["nodes"][-1]
        node["target"] = target
        if "from_file" in target or "_print" in target:
            node["inputs"] = [
                {"name": "filename" if "from" in target else "s", "arg": {"as_string": "/etc/hostname"}, "kind": 1}
            ]

    path = write(tmp_path / "m.pt2", edited(entries, GRAPH, change))
    with pytest.raises(ModelError):
        import_pt2(path)
    with pytest.raises(ModelError):
        reference.run(pt2.read(path), [torch.randn(2, 4)])


def test_what_may_be_called():
    assert all(
        callable_safely(t) for t in ("aten.add.Tensor", "aten.gelu.default", "aten.einsum.default", "aten.full.default")
    )
    assert not any(
        callable_safely(t) for t in ("aten.from_file.default", "aten._print.default", "aten.set_.source_Storage")
    )


# -- damaged and hostile archives ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs", "a/../../b", "a\\..\\b", "C:/x", "x\0y"])
def test_names_that_leave_the_archive(name, saved, tmp_path):
    entries, _ = saved
    path = tmp_path / "m.pt2"
    with zipfile.ZipFile(path, "w") as z:
        for k, v in entries.items():
            z.writestr("m/" + k, v)
        info = zipfile.ZipInfo("plain")
        info.filename = name
        z.writestr(info, b"x")
    if "\0" in name:  # zipfile itself cuts names at NUL; what is left is an ordinary entry of another root
        with pytest.raises(ModelError):
            load_pt2(path)
        return
    with pytest.raises(ModelError, match="relative path inside"):
        load_pt2(path)


def test_names_that_stand_twice(saved, tmp_path):
    entries, _ = saved
    with pytest.raises(ModelError, match="stands twice"):
        load_pt2(write(tmp_path / "m.pt2", [*entries.items(), (GRAPH, b"{}")]))


def test_zip_bombs(saved, tmp_path):
    entries, _ = saved
    bomb = {**entries, "extra/zeros": bytes(64 << 20)}
    with pytest.raises(ModelError, match="expansion"):
        load_pt2(write(tmp_path / "m.pt2", bomb, compression=zipfile.ZIP_DEFLATED))


def test_a_bomb_inside_legacy_weights(saved, tmp_path):
    entries, _ = saved
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("archive/data/0", bytes(64 << 20))
    entries = {k: v for k, v in entries.items() if k != WEIGHTS} | {"data/weights/model.pt": inner.getvalue()}
    with pytest.raises(ModelError, match="expansion"):
        load_pt2(write(tmp_path / "m.pt2", entries))
