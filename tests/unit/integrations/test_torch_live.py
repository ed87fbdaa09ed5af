"""``package.module:factory``: what is taken, what is refused with which words, and what running it leaves behind."""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fusionreg.core.errors import ArgumentError, ModelError, UnknownNameError  # noqa: E402
from fusionreg.core.evaluate.evaluator import evaluate  # noqa: E402
from fusionreg.core.ops import default_vocabulary  # noqa: E402
from fusionreg.integrations import Declared, is_live, open_model  # noqa: E402

OPS = default_vocabulary()

CODE = """
import sys
import torch
from torch import nn

print("imported", flush=True)

class Tagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, ids, x, scale=2.0, *, mask=None):
        y = self.linear(self.table(ids) + x) * scale
        return y if mask is None else y + mask

def build():
    print("built")
    torch.manual_seed(0)
    return Tagged().eval(), (torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, 4))

def masked():
    module, args = build()
    mask = torch.zeros(2, 5, 4)
    mask[0, 0] = -torch.inf
    return module, args, {"mask": mask}

def bare():
    torch.manual_seed(0)
    return Tagged().eval()

net = bare()
value = 3
class Inner:
    made = staticmethod(build)
    @property
    def raises(self): raise ValueError("no such thing")
inner = Inner()

class Leaves(nn.Module):
    def forward(self, x): sys.exit(3)
def leaves(): return Leaves(), (torch.ones(2),)
def exits(): sys.exit(0)
def raises():
    raise RuntimeError("first line\\nsecond line")
def needs(width): return net
def number(): return 3
def numbers(): return net, (torch.ones(1),), [1]
def four(): return net, 1, {}, 4
def empty(): return ()
def exported(): return torch.export.export(nn.Linear(4, 3).eval(), (torch.randn(2, 4),))
def lazily():
    import live_helper_of_a_test
    return live_helper_of_a_test.build()
"""
HELPER = "import live_zoo_of_a_test\nbuild = live_zoo_of_a_test.build\n"
NAME = "live_zoo_of_a_test"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text(CODE)
    (tmp_path / "live_helper_of_a_test.py").write_text(HELPER)
    (tmp_path / "live_broken_of_a_test.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "live_unparsable_of_a_test.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("live_") and n.endswith("_of_a_test")]:
        del sys.modules[name]


def opened(name, *inputs):
    return open_model(f"{NAME}:{name}", ops=OPS, declared=[Declared.parse(i) for i in inputs])


def line(words):
    """``:number`` of the line of the model's code with ``words``."""
    return f"{NAME}.py:{next(i for i, text in enumerate(CODE.splitlines(), 1) if words in text)}"


IDS, X = "ids=2x5:int64", "x=2x5x4:float32"


@pytest.mark.parametrize("name", ["build", "masked", "Inner.made", "exported", "lazily"])
def test_factories(name, capfd):
    path = list(sys.path)
    model = opened(name)
    inputs = dict(model.example(0))
    (want,), (got,) = model.reference(inputs).values(), evaluate(model.graph, inputs, ops=OPS).values()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert sys.path == path
    out, err = capfd.readouterr()
    assert out == "" and "imported" in err  # stdout is the command's own: --json must stay JSON


@pytest.mark.parametrize("name", ["bare", "net", "Tagged"])
def test_modules_take_declared_inputs(name):
    """A factory, a module that stands there, and a class; indices stay below the rows of the table."""
    model = opened(name, X, IDS)  # in any order
    first, again, other = (dict(model.example(seed)) for seed in (0, 0, 1))
    assert set(first) == {"ids", "x"} and first["ids"].shape == (2, 5) and first["ids"].dtype == np.int64
    assert 0 <= first["ids"].min() <= first["ids"].max() < 3
    np.testing.assert_array_equal(first["x"], again["x"])
    assert not np.array_equal(first["x"], other["x"])
    if name != "Tagged":  # which is in training mode, and has nothing that minds
        (want,), (got,) = model.reference(first).values(), evaluate(model.graph, first, ops=OPS).values()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_declared_inputs_win_and_reach_keyword_arguments():
    model = opened("build", "ids=1x7:int64", "x=1x7x4:float32", "mask=7x4:float32")
    assert {k: v.shape for k, v in model.example(0).items()} == {"ids": (1, 7), "x": (1, 7, 4), "mask": (7, 4)}


def test_another_seed_draws_what_only_the_author_knows_not():
    """At 0 the model's own inputs; later floats and indices are drawn anew, a mask with infinities is not."""
    model = opened("masked")
    given, drawn = model.example(0), model.example(4)
    assert (given["x"] == 1).all() and not given["ids"].any()
    assert not np.array_equal(drawn["x"], given["x"]) and abs(drawn["x"].mean()) < 1
    assert drawn["ids"].any() and drawn["ids"].max() < 3
    np.testing.assert_array_equal(drawn["mask"], given["mask"])
    np.testing.assert_array_equal(drawn["x"], model.example(4)["x"])


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (f"{NAME}:biuld", f"AttributeError: {NAME} has no 'biuld' — did you mean build"),
        (f"{NAME}:Inner.make", "Inner has no 'make' — did you mean made"),
        (f"{NAME}:zzz", "has no 'zzz' — a callable"),
        (f"{NAME}:inner.raises", f"it raised ValueError: no such thing at {line('def raises(self)')}"),
        (f"{NAME}:value", "a int, which cannot be called"),
        (f"{NAME}:exits", f"it raised SystemExit: 0 at {line('def exits')}"),
        (f"{NAME}:leaves", f"tracing it raised SystemExit: 3 at {line('def forward(self, x): sys')}"),
        (f"{NAME}:raises", f"it raised RuntimeError: first line at {line('raise RuntimeError')}"),
        (f"{NAME}:needs", "it takes arguments (missing a required argument: 'width')"),
        (f"{NAME}:number", "it returned a int — a module, or (module, example inputs)"),
        (f"{NAME}:numbers", "keyword arguments as a list of int — a dict of them by name"),
        (f"{NAME}:four", "it returned a tuple of Tagged, int, dict, int"),
        (f"{NAME}:empty", "it returned a tuple of nothing"),
        (f"{NAME}:bare", "a module without example inputs"),
        ("live_broken_of_a_test:f", "importing it raised ZeroDivisionError: division by zero at live_broken_of_a_test"),
        ("live_unparsable_of_a_test:f", "importing it raised SyntaxError"),
        ("live_nowhere_of_a_test:f", "No module named 'live_nowhere_of_a_test'"),
        ("os.path:join", "it takes arguments"),
        (f"{NAME}:", "no import path — package.module:factory"),
        (":build", "no import path"),
        (f"{NAME}:a b", "no import path"),
    ],
)
def test_what_is_refused(target, says):
    with pytest.raises(ModelError) as caught:
        open_model(target, ops=OPS)
    assert says in str(caught.value) and caught.value.facts["target"] == target
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([X], "no input for ids — --input ids=SHAPE:DTYPE"),
        ([IDS, X, "z=1:float32"], "no argument 'z' of Tagged.forward — one of ids, x, scale, mask"),
        ([IDS, X, X], "the input 'x' twice"),
    ],
)
def test_inputs_that_do_not_fit_the_module(inputs, says):
    with pytest.raises(ModelError) as caught:
        opened("bare", *inputs)
    assert says in str(caught.value)


def test_inputs_that_the_module_cannot_take():
    with pytest.raises(ModelError, match="cannot export Tagged"):
        opened("bare", IDS, "x=2x5x3:float32")
    with pytest.raises(ModelError, match="an exported program"):
        opened("exported", "input=2x4:float32")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x=8x128:float32", Declared("x", (8, 128), "float32")),
        (" ids=4:int64 ", Declared("ids", (4,), "int64")),
        ("_s1=:bool", Declared("_s1", (), "bool")),
        ("x=0x3:bfloat16", Declared("x", (0, 3), "bfloat16")),
    ],
)
def test_declared(text, found):
    assert Declared.parse(text) == found


@pytest.mark.parametrize(
    "text", ["", "x", "x=", "x=8", "x=8:", "=8:float32", "x=8,8:float32", "x=-1:int8", "x=8x:float32", "1x=8:int8",
             "x=x8:int8", "x=8:string"],
)  # fmt: skip
def test_what_is_not_declared_so(text):
    with pytest.raises(ArgumentError):
        Declared.parse(text)


def test_a_dtype_that_there_is_not():
    with pytest.raises(UnknownNameError, match="did you mean float32"):
        Declared.parse("x=8:flaot32")


def test_paths_are_never_imported(folder):
    """A file of such a name is a file, whatever stands in it; declared inputs are for code alone."""
    assert is_live("pkg.net:build") and not any(map(is_live, ("model.onnx", "a:b.pt2", "model.tflite", folder)))
    (folder / f"{NAME}:build").write_text("raise SystemExit\n")
    with pytest.raises(ModelError, match="the suffix"):
        open_model(f"{NAME}:build", ops=OPS)
    (folder / "m.pt2").write_bytes(b"")
    with pytest.raises(ModelError, match="declared for a file"):
        open_model("m.pt2", ops=OPS, declared=[Declared("x", (1,), "float32")])
    assert NAME not in sys.modules
