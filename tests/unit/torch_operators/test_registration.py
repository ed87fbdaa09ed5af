"""Names and schemas of operators; two registries in one process; what a call costs."""

from __future__ import annotations

import gc
import timeit
import weakref

import pytest
import torch
from registry_kit import module, only
from torch.library import Library

from fusionreg import AttributeSpec, FusionSpec, Registry
from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import Region
from fusionreg.integrations.torch.operators import Operators
from fusionreg.integrations.torch.operators.schema import operator_name, schema


def spec(name="acme.relu", **fields):
    given = {
        "api": 1, "name": name, "pattern": "y = Relu(x)", "inputs": {"x": "T[M]"}, "outputs": {"y": "T[M]"},
        "dtypes": {"T": ("float32", "float16")},
    }  # fmt: skip
    return FusionSpec(**{**given, **fields})


def made(*specs):
    catalog = only(("acme", module(register_fusions=list(specs))))
    assert not catalog.failures, catalog.failures
    return Operators(Registry(catalog, device="sim"))


@pytest.mark.filterwarnings("ignore::fusionreg.core.runtime.dispatch.FallbackWarning")
class TestSchemas:
    """Fusions without kernels run their operators: values come from the pattern."""

    def test_attributes_choices_and_what_may_be_absent(self):
        operators = made(
            spec(
                "acme.everything",
                pattern='a = Mul(x, gain)\nb = optional(any_of(Add, Sub), "way")(a, shift)\n'
                'y = optional(any_of(Relu, Tanh), "act")(b)\n'
                "z = LeakyRelu(y, alpha=slope)\nw = Clip(z)",
                inputs={"x": "T[M N]", "gain": "T[]", "shift": "T[N]"}, outputs={"w": "T[M N]"},
                attributes={"slope": AttributeSpec(type="float")},
            )
        )  # fmt: skip
        op = operators["acme.everything"]
        assert str(op._schema) == (
            "fusionreg::acme_everything(Tensor x, Tensor gain, Tensor? shift=None, *, float slope, "
            'str? way=None, str act="none") -> Tensor'
        )
        x, shift = torch.randn(3, 4), torch.randn(4)
        leaky = torch.nn.functional.leaky_relu
        assert torch.allclose(op(x, torch.tensor(2.0), slope=0.5), leaky(x * 2, 0.5))
        found = op(x, torch.tensor(2.0), shift, slope=0.5, way="Sub", act="Tanh")
        assert torch.allclose(found, leaky((x * 2 - shift).tanh(), 0.5))
        assert set(torch.library.opcheck(op, (x, torch.tensor(2.0), None), {"slope": 0.1}).values()) == {"SUCCESS"}

    def test_an_absent_tensor_before_a_present_one(self):
        operators = made(
            spec(
                "acme.middle", pattern="b = optional(Add)(x, shift)\ny = Mul(b, gain)",
                inputs={"x": "T[M]", "shift": "T[M]", "gain": "T[M]"},
            )
        )  # fmt: skip
        op = operators["acme.middle"]
        assert str(op._schema).startswith("fusionreg::acme_middle(Tensor x, Tensor? shift, Tensor gain)")
        x, gain = torch.randn(5), torch.randn(5)
        assert torch.equal(op(x, None, gain), x * gain) and torch.equal(op(x, x, gain), (x + x) * gain)

    def test_numbers_that_schemas_cannot_write(self):
        operators = made(
            spec(
                "acme.bounded", pattern="y = LeakyRelu(x, alpha=slope)",
                attributes={"slope": AttributeSpec(type="float", default=float("inf"))},
            )
        )  # fmt: skip
        op = operators["acme.bounded"]
        assert "float? slope=None" in str(op._schema)
        x = torch.tensor([-1.0, 2.0])
        assert op(x).tolist() == [float("-inf"), 2.0] and op(x, slope=0.5).tolist() == [-0.5, 2.0]

    def test_a_result_is_never_the_input(self):
        """An operator may hand its input back (dropout with p = 0): the result is a tensor of its own all the same."""
        operators = made(spec("acme.same", pattern="y = Identity(x)"), spec(
            "acme.kept", pattern="y = fusionreg.Dropout(x, rng, p=p)", inputs={"x": "T[M]", "rng": "int64[2]"},
            attributes={"p": AttributeSpec(type="float", default=0.5)},
        ))  # fmt: skip
        x = torch.randn(6)
        for y in (operators["acme.same"](x), operators["acme.kept"](x, torch.tensor([1, 2]), p=0.0)):
            assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
            y.zero_()
        assert x.abs().max() > 0

    def test_results_of_operators_are_laid_out_as_promised(self):
        """Operators keep odd strides; a result is row-major unless the spec says whose order it takes."""
        operators = made(
            spec("acme.plain", inputs={"x": "T[M N]"}, outputs={"y": "T[M N]"}),
            spec("acme.alike", inputs={"x": "T[M N]"}, outputs={"y": "T[M N]"}, layouts={"y": "x"}),
        )
        x = torch.randn(5, 3).t()
        for name, strides in (("acme.plain", (5, 1)), ("acme.alike", (1, 3))):
            y = operators[name](x)
            assert y.stride() == strides and torch.equal(y, x.relu())
            with torch._subclasses.FakeTensorMode() as mode:
                assert operators[name](mode.from_tensor(x)).stride() == strides

    def test_derived_fusions(self):
        catalog = load(allow=("pointwise",))
        operators = Operators(Registry(catalog, device="sim"))
        region = Region(
            name="r0123abcdef", pattern="y = Abs(x)", inputs={"x": "T[A0]"}, outputs={"y": "T[A0]"},
            dtypes={"T": ("float32",)},
        )  # fmt: skip
        entry = catalog.derive(catalog["pointwise.region"], region)
        x = torch.randn(7)
        assert torch.equal(operators[entry.name](x), x.abs())
        assert str(operators[entry.name]._schema).startswith("fusionreg::pointwise_region_r0123abcdef(Tensor x)")

    def test_names_are_words(self):
        assert operator_name("norm.layer-norm.r:1 é") == "norm_layer_norm_r_1_"
        entry = made(spec()).registry["acme.relu"]
        assert schema(entry) == "(Tensor x) -> Tensor"


@pytest.mark.filterwarnings("ignore::fusionreg.core.runtime.dispatch.FallbackWarning")
class TestSeveral:
    def test_two_specs_of_one_name(self):
        """The second has its own operator; the first still does what it did."""
        first, second = made(spec("acme.twice")), made(spec("acme.twice", pattern="y = Neg(x)"))
        third = made(spec("acme.twice", pattern="y = Neg(x)"))
        x = torch.tensor([-1.0, 2.0])
        ops = [o["acme.twice"] for o in (first, second, third)]
        assert len(set(ops)) == 3 and ops[0]._schema.name == "fusionreg::acme_twice"
        assert ops[1]._schema.name.startswith("fusionreg::acme_twice_")
        assert ops[2]._schema.name == f"{ops[1]._schema.name}_2"
        assert [op(x).tolist() for op in ops] == [[0.0, 2.0], [1.0, -2.0], [1.0, -2.0]]

    def test_names_that_are_one_word_of_torch(self):
        operators = made(spec("acme.a_b.c"), spec("acme.a.b_c", pattern="y = Neg(x)"))
        x = torch.tensor([-1.0])
        assert operators["acme.a_b.c"](x) == 0 and operators["acme.a.b_c"](x) == 1

    def test_one_object_each(self):
        operators = made(spec("acme.once"))
        assert operators["acme.once"] is operators["acme.once"]
        assert Operators.of(operators.registry) is Operators.of(operators.registry)

    def test_an_operator_outlives_what_made_it(self):
        """A compiled graph holds the operator alone."""
        operators = made(spec("acme.lasting"))
        op, gone = operators["acme.lasting"], weakref.ref(operators)
        del operators
        gc.collect()
        assert gone() is None
        assert op(torch.tensor([-1.0, 3.0])).tolist() == [0.0, 3.0]
        assert torch.ops.fusionreg.acme_lasting.default is op


def seconds(times=100, **functions):
    """The least of many short turns, taken in rotation: others use the processor too."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(60):
        for name, f in functions.items():
            best[name] = min(best[name], timeit.timeit(f, number=times) / times)
    return best


def test_a_call_costs_little_more_than_the_runtime(operators, monkeypatch):
    """One turn through torch's dispatcher and no second one: measured against the runtime alone, with and without a
    gradient mode, where no input asks for a gradient."""
    x, scale, bias = torch.randn(4, 40), torch.randn(40), torch.randn(40)
    op, runtime = operators["norm.layernorm"], operators.registry.runtime
    op(x, scale, bias)
    for prepared in runtime._prepared.values():  # what is measured is the way there, not the simulator
        monkeypatch.setattr(prepared, "run", lambda inputs, outputs: outputs)
    library = Library("fusionreg_test", "FRAGMENT")
    library.define("nothing(Tensor x, Tensor s, Tensor b, *, float epsilon=1e-5) -> Tensor")
    library.impl("nothing", lambda x, s, b: x, "CPU")
    library.impl("nothing", torch.library.fallthrough_kernel, "Autograd")
    nothing = torch.ops.fusionreg_test.nothing.default

    def call():
        return op(x, scale, bias)

    def inference():
        with torch.inference_mode():
            for _ in range(50):
                op(x, scale, bias)

    found = seconds(
        runtime=lambda: runtime.run("norm.layernorm", (x, scale, bias), {}), turn=lambda: nothing(x, scale, bias),
        call=call,
    )  # fmt: skip
    found |= {"inference": seconds(2, inference=inference)["inference"] / 50}
    assert found["call"] < 1.6 * (found["runtime"] + found["turn"]), found
    assert found["inference"] < 1.6 * (found["runtime"] + found["turn"]), found
