"""``.pt2`` files that are damaged, older, or hold more than one model; every fault is a typed error."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import zipfile

import pytest
import torch
from pt2_files import GRAPH, OPS, WEIGHTS, Payload, check_values, edited, write
from torch import nn

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.integrations.torch import export, import_pt2, load_pt2, pt2, reference


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
