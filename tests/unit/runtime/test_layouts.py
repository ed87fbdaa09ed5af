"""How outputs of a model's site lie in memory, and whose memory it is: the same whoever computes them."""

from __future__ import annotations

import numpy as np
import plugin_kit
import pytest

from fusionreg.core import simulator
from fusionreg.core.cache import Cache
from fusionreg.core.errors import ArgumentError
from fusionreg.core.problem import Outline, Tensor, outlines
from fusionreg.core.runtime import FallbackWarning, Runtime

torch = pytest.importorskip("torch")

FUSION = "acme.add_relu"
X = np.linspace(-2, 2, 48, dtype=np.float32).reshape(6, 8)
BIAS = np.linspace(-1, 1, 8, dtype=np.float32)
EXPECTED = np.maximum(X + BIAS, 0)


class Simulated:
    """relu(x + bias), of arrays as they lie."""

    def launch(self, arguments, launch, **options):
        x, bias, y = (a for a in arguments if isinstance(a, np.ndarray))
        assert x.flags.c_contiguous and y.flags.c_contiguous
        y[...] = np.maximum(x + bias, 0)


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(simulator, "compile", lambda source, **options: Simulated(), raising=False)

    def make(**changes):
        made = plugin_kit.catalog(
            tmp_path / "p", {"k.cu.j2": plugin_kit.ADD_RELU}, plugin_kit.add_relu(layouts={"y": "x"}, **changes)
        )
        return Runtime(made, "sim", Cache(tmp_path / "cache"))

    return make


def arrays(library, transposed):
    x = np.ascontiguousarray(X.T).T if transposed else X.copy()
    return (x, BIAS.copy()) if library == "numpy" else (torch.from_numpy(x), torch.from_numpy(BIAS.copy()))


def strides(y):
    return tuple(s // y.itemsize for s in y.strides) if isinstance(y, np.ndarray) else y.stride()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("changes", [{}, {"kernel_requires": "N % 3 == 0"}], ids=["kernel", "unfused"])
@pytest.mark.filterwarnings("ignore::fusionreg.core.runtime.FallbackWarning")
def test_the_order_that_the_spec_names(runtime, library, transposed, changes):
    """An input that is copied for the kernel's sake still lends the output its memory order."""
    made = runtime(**changes)
    given = arrays(library, transposed)
    y = made.run(FUSION, given, {})
    assert np.array_equal(np.asarray(y), EXPECTED)
    assert strides(y) == ((1, 6) if transposed else (8, 1))
    outcome = made.execute(FUSION, given, {})
    assert strides(outcome.outputs[0]) == strides(y) and bool(outcome.kernel) == (not changes)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_operator_that_hands_its_input_back(tmp_path, library):
    """What comes out is a copy, and two outputs are never one array."""
    fusion = plugin_kit.add_relu(
        pattern="y = Identity(x)\nz = Identity(y)\nw = Add(x, bias)", outputs=dict.fromkeys("yzw", "T[... M N]"),
        kernels=(),
    )  # fmt: skip
    made = Runtime(plugin_kit.catalog(tmp_path / "p", {}, fusion), "sim")
    x, bias = arrays(library, False)
    with pytest.warns(FallbackWarning):
        y, z, _ = made.run(FUSION, (x, bias), {})
    y[...] = 7
    assert np.array_equal(np.asarray(x), X) and np.array_equal(np.asarray(z), X)


def test_gradients_are_asked_about_where_they_can_be_wanted(runtime):
    """A layout says that an input wants a gradient; whether one is recorded is asked at each call."""
    made = runtime()
    x, bias = arrays("torch", False)
    bias.requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert np.array_equal(made.run(FUSION, (x, bias), {}).numpy(), EXPECTED)
    with pytest.raises(ArgumentError, match="requires a gradient"):
        made.run(FUSION, (x, bias), {})
    with pytest.raises(ArgumentError, match="requires a gradient"):
        made.call(FUSION, x, bias)


class Extent:
    """A number that may be compared and multiplied, and nothing else: what a tracer has."""

    def __init__(self, value, asked):
        self.value, self.asked = value, asked

    def __eq__(self, other):
        self.asked.append((self.value, getattr(other, "value", other)))
        return self.value == getattr(other, "value", other)

    def __ne__(self, other):
        return not self == other

    __hash__ = None


def test_outputs_are_told_from_extents_that_are_no_numbers(runtime):
    """Nothing is asked but whether extents that a spec writes alike are alike."""
    entry, asked = runtime().catalog[FUSION], []
    m, n, own = Extent(6, asked), Extent(8, asked), Extent(8, asked)
    given = {"x": Tensor("float32", (m, n), (n, 1)), "bias": Tensor("float32", (own,), (1,))}
    entry = type(entry)(**{**vars(entry), "spec": entry.spec.model_copy(update={"layouts": {}})})
    assert outlines(entry, given, {}) == {"y": Outline("float32", (m, n), None)}
    assert {frozenset(pair) for pair in asked} <= {frozenset({8}), frozenset({6})}
