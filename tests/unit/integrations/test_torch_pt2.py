"""``.pt2`` files as untrusted input: nothing of them runs, whatever they hold; every fault is a typed error."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import sys
import warnings
import zipfile

import pytest
import torch
from torch import nn

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.torch import export, import_pt2, load_pt2, pt2, reference
from fusionreg.integrations.torch.schemas import callable_safely

OPS = default_vocabulary()
GRAPH, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"


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


def write(path, entries, root="m/", compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as z, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of names that stand twice
        for name, data in entries.items() if isinstance(entries, dict) else entries:
            z.writestr(root + name, data)
    return path


def edited(entries, name, change):
    """The entries with a JSON one changed in place by ``change``."""
    document = json.loads(entries[name])
    change(document)
    return {**entries, name: json.dumps(document).encode()}


class Payload:
    """Pickles to a call of os.mkdir: unpickling it leaves a folder behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def check_values(path, module):
    imported = import_pt2(path)
    x = torch.randn(5, 4)
    graph = imported.graph
    got = evaluate(graph, {graph.inputs[0]: x.numpy()}, ops=OPS)[graph.outputs[0]]
    torch.testing.assert_close(torch.from_numpy(got), module(x).detach())


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


def test_damaged_bytes(saved, tmp_path):
    entries, _ = saved
    whole = write(tmp_path / "m.pt2", entries).read_bytes()
    at = whole.index(entries["data/weights/weight_0"])
    for data, words in (
        (b"", "zip"), (whole[: len(whole) // 2], "zip"), (b"PK\3\4" + bytes(50), "zip"),
        (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "damaged"),
    ):  # fmt: skip
        (tmp_path / "bad.pt2").write_bytes(data)
        with pytest.raises(ModelError, match=words):
            load_pt2(tmp_path / "bad.pt2")
    with pytest.raises(ModelError, match="no such file"):
        load_pt2(tmp_path / "none.pt2")
    with pytest.raises(ModelError, match="no such file"):
        load_pt2(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("archive_format", b"zip", "archive_format"),
        (GRAPH, b"{", "no JSON"),
        (GRAPH, b"[" * 100_000, "no JSON"),
        (GRAPH, b"[]", "schema version"),
        (GRAPH, b'{"schema_version": {"major": 9, "minor": 0}}', "schema version"),
        (GRAPH, b'{"schema_version": {"major": 8, "minor": 1}}', "malformed"),
        (WEIGHTS, b"{}", "malformed"),
        (WEIGHTS, b'{"config": {"0.weight": {"path_name": "../x"}}}', "0.weight"),
    ],
)
def test_damaged_entries(name, change, words, saved, tmp_path):
    entries, _ = saved
    with pytest.raises(ModelError, match=words):
        load_pt2(write(tmp_path / "m.pt2", {**entries, name: change}))


@pytest.mark.parametrize("missing", [GRAPH, WEIGHTS, "data/weights/weight_0", "archive_format"])
def test_missing_entries(missing, saved, tmp_path):
    entries, _ = saved
    with pytest.raises(ModelError):
        load_pt2(write(tmp_path / "m.pt2", {k: v for k, v in entries.items() if k != missing}))


@pytest.mark.parametrize(
    "meta",
    [
        {"sizes": [{"as_int": 300}, {"as_int": 4}]},
        {"sizes": [{"as_int": -3}, {"as_int": 4}]},
        {"strides": [{"as_int": 4000}, {"as_int": 1}]},
        {"strides": [{"as_int": -4}, {"as_int": 1}]},
        {"storage_offset": {"as_int": 10**15}},
        {"storage_offset": {"as_int": -1}},
        {"sizes": [{"as_int": 10**9}, {"as_int": 10**9}], "strides": [{"as_int": 0}, {"as_int": 0}]},
        {"dtype": 99},
        {"dtype": 13},
    ],
)
def test_weights_that_lie(meta, saved, tmp_path):
    """Shapes, strides and dtypes that the bytes do not cover, or that the graph does not declare."""
    entries, _ = saved
    lied = edited(entries, WEIGHTS, lambda table: table["config"]["0.weight"]["tensor_meta"].update(meta))
    with pytest.raises(ModelError):
        load_pt2(write(tmp_path / "m.pt2", lied))


def test_random_damage_is_a_typed_error(saved, tmp_path):
    """Leaves of the graph replaced at random: a model, or a typed error; never anything else."""
    entries, _ = saved
    rng = random.Random(7)
    original = json.loads(entries[GRAPH])
    junk = [None, -1, 10**30, "x", "", [], {}, {"as_int": 1}, {"as_tensor": {"name": "nobody"}}, True, 1.5, [[[]]]]
    outcomes = set()
    for _try in range(150):
        document = copy.deepcopy(original)
        node, path = document["graph_module"], []
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            parent, node = node, node[key]
            path.append(key)
            if len(path) > 3 and rng.random() < 0.2:
                break
        parent[key] = rng.choice(junk)
        damaged = write(tmp_path / "m.pt2", {**entries, GRAPH: json.dumps(document).encode()})
        try:
            import_pt2(damaged)
            outcomes.add("loaded")
        except FusionregError:
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}


# -- layouts -------------------------------------------------------------------------------------------------


def legacy(entries, module):
    """The same model as torch 2.7 and earlier laid it out: no root folder, state in pickles."""
    state = io.BytesIO()
    torch.save({k: v.detach() for k, v in module.state_dict().items()}, state)
    empty = io.BytesIO()
    torch.save({}, empty)
    return {
        "version": b"8.8",
        "serialized_exported_program.json": entries[GRAPH],
        "serialized_state_dict.pt": state.getvalue(),
        "serialized_constants.pt": empty.getvalue(),
        "serialized_example_inputs.pt": pickle.dumps(Payload("/nonexistent/ran")),
    }


def test_older_layouts(saved, tmp_path):
    entries, module = saved
    check_values(write(tmp_path / "old.pt2", legacy(entries, module), root=""), module)
    state = io.BytesIO()
    torch.save(dict(module.state_dict()), state)
    between = {k: v for k, v in entries.items() if k != WEIGHTS} | {"data/weights/model.pt": state.getvalue()}
    check_values(write(tmp_path / "between.pt2", between), module)


def test_several_models_in_one_file(saved, tmp_path):
    entries, _ = saved
    renamed = {k.replace("model.json", "b.json").replace("model_", "b_"): v for k, v in entries.items() if "model" in k}
    path = write(tmp_path / "m.pt2", {**entries, **renamed})
    assert load_pt2(path, model="b").nodes == load_pt2(path).nodes
    with pytest.raises(ModelError, match="named 'c'"):
        load_pt2(path, model="c")


def test_shared_storage_stays_shared(tmp_path):
    """Views of one memory, tied weights, strides and offsets: as in the module."""
    base = torch.arange(24.0).view(4, 6)

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(base)
            self.register_buffer("b", self.a.detach()[1:3, ::2])
            self.register_buffer("c", self.a.detach().t())
            self.tied = self.a
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("low", torch.randn(3).bfloat16(), persistent=False)

        def forward(self, x):
            return x @ self.a, self.b * 2, self.c + 1, x @ self.tied, self.empty, self.low

    module, x = Views().eval(), torch.randn(2, 4)
    torch.export.save(export(module, (x,)), tmp_path / "v.pt2")
    program = pt2.read(tmp_path / "v.pt2")
    storages = {n: program.weights[n].untyped_storage().data_ptr() for n in ("a", "b", "c")}
    assert len(set(storages.values())) == 1
    outcome = reference.execute(program, [x])
    for got, want in zip(outcome.leaves, module(x), strict=True):
        assert torch.equal(got, want)


def test_every_weight_dtype_loads(tmp_path):
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.bool]

    class Typed(nn.Module):
        def __init__(self):
            super().__init__()
            for i, d in enumerate(dtypes):
                self.register_buffer(f"b{i}", torch.tensor([0, 1, 2]).to(d))

        def forward(self, x):
            return [getattr(self, f"b{i}").to(x.dtype) + x for i in range(len(dtypes))]

    module, x = Typed(), torch.randn(3)
    torch.export.save(export(module, (x,)), tmp_path / "t.pt2")
    graph = load_pt2(tmp_path / "t.pt2")
    found = evaluate(graph, {graph.inputs[0]: x.numpy()}, ops=OPS)
    for name, want in zip(graph.outputs, module(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(found[name]), want)


def test_a_region_under_autocast_says_what_to_do(tmp_path):
    class Region(nn.Module):
        def forward(self, x, w):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ w

    args = (torch.randn(2, 3), torch.randn(3, 4))
    ep = export(Region(), args)
    torch.export.save(ep, tmp_path / "r.pt2")
    with pytest.raises(ModelError, match="run_decompositions"):
        load_pt2(tmp_path / "r.pt2")
    torch.export.save(ep.run_decompositions({}), tmp_path / "r.pt2")
    assert [n.op for n in load_pt2(tmp_path / "r.pt2").nodes] == ["Cast", "Cast", "MatMul"]


def test_structures_of_classes_that_are_not_here(saved, tmp_path):
    """A registered class with named fields comes out as a dict, one without as a tuple; no class is imported."""
    entries, module = saved
    leaf = {"type": None, "context": None, "children_spec": []}

    def become(context):
        def change(document):
            signature = document["graph_module"]["module_call_graph"][0]["signature"]
            tree = {"type": "transformers.modeling_outputs.Output", "context": context, "children_spec": [leaf]}
            signature["out_spec"] = json.dumps([1, tree])

        return change

    x = torch.randn(2, 4)
    for context, read_back in ((json.dumps(["logits"]), lambda r: r["logits"]), ("null", lambda r: r[0])):
        path = write(tmp_path / "m.pt2", edited(entries, GRAPH, become(context)))
        torch.testing.assert_close(read_back(reference.run(pt2.read(path), [x])), module(x).detach())
