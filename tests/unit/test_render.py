"""Rendering: names are strict, values cannot carry code, literals are exact, every line knows where it came from."""

from __future__ import annotations

import locale
import math
import os
import re
import struct
import subprocess
import sys

import plugin_kit
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering import problem_of, rendered

from fusionreg.core.errors import RenderError
from fusionreg.core.problem import Tensor, bind
from fusionreg.core.render import render, variant
from fusionreg.core.render.values import c_text, float_literal, guarded, identifier, int_literal
from fusionreg.core.spec import AttributeSpec

#: A kernel that reads all there is, around the text under test.
BODY = "{{ signature }} {\n  if (M * N == 0) return;\n  y[0] = x[0] + bias[0];\n%s}\n"


def fails(tmp_path, template, others=None, loaded=plugin_kit.ADD_RELU, **changes):
    """The error of rendering; a template the registry itself would refuse is swapped in after loading ``loaded``."""
    entry = plugin_kit.entry(tmp_path, loaded, **changes)
    for path, text in {"k.cu.j2": template, **(others or {})}.items():
        (entry.kernels[0].root / path).parent.mkdir(parents=True, exist_ok=True)
        (entry.kernels[0].root / path).write_text(text)
    with pytest.raises(RenderError) as caught:
        rendered(entry)
    return caught.value


# --- what a unit holds -----------------------------------------------------------------------------------------------


def test_a_unit_is_whole_and_ordered(tmp_path):
    source = rendered(plugin_kit.entry(tmp_path))
    text = source.text
    order = [
        "#include <cuda_fp16.h>",
        "namespace fr {",
        "using T = __half;",
        "#define HAS_bias 1",
        'extern "C" __global__',
    ]
    assert [text.index(o) for o in order] == sorted(text.index(o) for o in order)
    assert '#include "' not in text and "\x02" not in text and "\x03" not in text and "{{" not in text
    assert [(a.kind, a.parameter, a.ctype) for a in source.arguments] == [
        ("input", "x", "const __half* __restrict__"), ("input", "bias", "const __half* __restrict__"),
        ("output", "y", "__half* __restrict__"), ("axis", "M", "long long"), ("axis", "N", "long long"),
    ]  # fmt: skip
    assert source.headers == ("cuda_fp16.h",) and source.entry in text and "--ftz=false" in source.options


def test_rendering_is_deterministic_and_keyed_by_variant(tmp_path):
    entry = plugin_kit.entry(tmp_path)
    a, b = rendered(entry), rendered(entry, shape=(1000, 16))
    assert a.text == b.text and a.digest == b.digest  # extents are launch arguments
    assert rendered(entry, dtype="float32").entry != a.entry
    assert rendered(entry, target="sm_80").digest != a.digest
    p, q = problem_of(entry), problem_of(entry, shape=(7, 16))
    assert variant(entry, entry.kernels[0], p, {}) == variant(entry, entry.kernels[0], q, {})


def test_specialised_axes_params_constants_and_bounds(tmp_path):
    template = BODY % "  static_assert(N == 8 && VEC == 4 && TWICE == 8 && SCALE == 0.1f);\n"
    source = rendered(
        plugin_kit.entry(
            tmp_path, template, kernel_specialize="N", kernel_params={"VEC": (4, 2)}, kernel_block="32 * VEC",
            kernel_constants={"TWICE": "VEC * 2", "SCALE": "0.1"}, kernel_min_blocks=2, kernel_max_registers=64,
        )
    )  # fmt: skip
    assert "static constexpr int N = 8;" in source.text and "long long N" not in source.text
    assert "__launch_bounds__(128, 2)" in source.text and "--maxrregcount=64" in source.options
    assert f"static constexpr float SCALE = {float_literal(0.1)};" in source.text and source.params == {"VEC": 4}


def test_strides_attributes_and_workspace_are_parameters(tmp_path):
    template = BODY % "  if (x_stride_0 + x_stride_1 < 0 || alpha < 0.0f || workspace == nullptr) return;\n"
    entry = plugin_kit.entry(
        tmp_path, template, pattern="y = Swish(Add(x, bias), alpha=alpha)", kernel_strides="x",
        kernel_workspace="M * 4",
        attributes={"alpha": AttributeSpec(type="float", default=1.0)},
    )  # fmt: skip
    assert [a.parameter for a in rendered(entry).arguments] == [
        "x", "bias", "y", "x_stride_0", "x_stride_1", "M", "N", "alpha", "workspace",
    ]  # fmt: skip
    assert "float alpha" in rendered(entry).text and "double alpha" in rendered(entry, dtype="float64").text


def test_choices_and_absent_inputs(tmp_path):
    template = """\
{{ signature }} {
  if (M * N == 0) return;
{% if activation == "Tanh" %}
  static_assert(activation == activation_Tanh);
{% endif %}
#if HAS_bias
  y[0] = bias[0];
#endif
  y[0] = x[0];
}
"""
    entry = plugin_kit.entry(
        tmp_path,
        template,
        pattern='b = optional(Add)(Relu(x), bias)\ny = optional(any_of(Relu, Tanh), "activation")(b)',
    )
    assert "activation_Tanh)" in rendered(entry, activation="Tanh").text
    absent = bind(entry, {"x": Tensor.contiguous("float32", (4, 8))}, {}, "sm_90a")
    source = render(entry, entry.kernels[0], absent, {})
    assert "#define HAS_bias 0" in source.text and [a.name for a in source.arguments] == ["x", "y", "M", "N"]
    assert "static constexpr int activation = activation_none;" in source.text


# --- names are strict ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "variable", "words"),
    [
        ("{{ THREADZ }}", "THREADZ", "THREADS"),
        ("{% if false %}{{ THREADZ }}{% endif %}", "THREADZ", "THREADS"),  # a branch that is not taken
        ("{{ M }}", "M", "launch argument"),
        ("{{ x }}", "x", "pointer"),
        ("{{ THREADS|hexx }}", "", "hexx"),
        ("{{ missing|default(4) }}", "", "default"),
        ("{{ missing|d }}", "", "'d'"),
        ("{% if missing is defined %}{% endif %}", "missing", "missing"),
        ("{% if THREADS is defined %}{% endif %}", "", "defined"),
        ("{{ none }}", "", "NoneType"),
        ("{{ [1, 2] }}", "", "list"),
        ("{{ ''.__class__.__mro__ }}", "__class__", "unsafe"),
        ("{{ 1 // 0 }}", "", "zero|division"),
        ("{% for i in range(10000000000) %}{% endfor %}", "", "[Rr]ange"),
    ],
)
def test_mistakes_name_template_line_and_variable(tmp_path, line, variable, words):
    error = fails(
        tmp_path, BODY % ("  // one\n  // two\n" + line + "\n"), kernel_params={"THREADS": (256,)},
        kernel_block="THREADS",
        loaded=BODY % "  static_assert(THREADS == 256);\n",
    )  # fmt: skip
    assert error.facts["template"].endswith("k.cu.j2") and error.facts["line"] == 6, error
    assert error.facts.get("variable", "") == variable
    assert "k.cu.j2:6" in str(error)
    assert re.search(words, str(error)), error


def test_a_mistake_in_an_included_header_is_found_there(tmp_path):
    error = fails(tmp_path, '// a\n{{ include("inc.cuh") }}\n' + BODY % "", {"inc.cuh.j2": "// 1\n// 2\n{{ nope }}\n"})
    assert (
        error.facts["template"].endswith("inc.cuh.j2")
        and error.facts["line"] == 3
        and error.facts["variable"] == "nope"
    )


def test_syntax_errors(tmp_path):
    error = fails(tmp_path, "// a\n// b\n{% if %}\n")
    assert error.facts["line"] == 3 and error.facts["template"].endswith("k.cu.j2")


def test_a_template_without_a_kernel(tmp_path):
    assert "defines no kernel" in str(fails(tmp_path, "// nothing\n"))


@given(st.text(min_size=1, max_size=12))
def test_words_of_a_problem_are_identifiers_or_refused(text):
    """No word carries `{{`, quotes, newlines, semicolons or look-alike letters into CUDA source."""
    if text.isascii() and text.isidentifier():
        assert c_text(guarded("mode", text)) == text
    else:
        with pytest.raises(RenderError):
            guarded("mode", text)


@pytest.mark.parametrize(
    "name", ["a;b", "a b", "1a", "", "é", "float", "threadIdx", "a__b", "fr", "{{x}}", 'a"', "a\n"]
)
def test_names_that_c_or_cuda_owns(name):
    with pytest.raises(RenderError):
        identifier(name)


# --- literals --------------------------------------------------------------------------------------------------------


def evaluated(literal: str, kind: str = "f") -> float:
    """The value of a literal, by C++'s grammar read with Python: hexadecimal floats, or bits."""
    if "bit_cast" in literal:
        bits = int(literal.split("0x")[1].translate({ord(c): None for c in "UL)"}), 16)
        return struct.unpack(f"<{kind}", bits.to_bytes(4 if kind == "f" else 8, "little"))[0]
    return float.fromhex(literal.strip("()").rstrip("f")) if "0x" in literal else float(literal.strip("()").rstrip("f"))


@given(st.floats())
def test_float_literals_are_exact(value):
    try:
        expected = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        expected = math.copysign(math.inf, value)
    got = evaluated(float_literal(value))
    assert (math.isnan(got) and math.isnan(expected)) or struct.pack("<f", got) == struct.pack("<f", expected)
    wide = evaluated(float_literal(value, double=True), "d")
    assert struct.pack("<d", wide) == struct.pack("<d", value) or (math.isnan(wide) and math.isnan(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (-1, "-1"), (2**31, "2147483648LL"), (-(2**31), "(-2147483648LL)"), (2**63, "9223372036854775808ULL"),
        (-(2**63), "(-9223372036854775807LL - 1)"), (True, "true"), (1e-45, "0x1p-149f"),
        (-0.0, "(-0.0f)"), (math.inf, "__builtin_bit_cast(float, 0x7f800000U)"),
    ],
)  # fmt: skip
def test_literals(value, text):
    assert c_text(value) == text


def test_integers_beyond_64_bits_are_refused():
    with pytest.raises(RenderError, match="64 bits"):
        int_literal(2**64)


def test_literals_do_not_follow_the_locale():
    names = [n for n in ("de_DE.UTF-8", "fr_FR.UTF-8") if _has(n)]
    code = "import locale; locale.setlocale(locale.LC_ALL, '')\n"
    code += "from fusionreg.core.render.values import c_text; print(c_text(0.1))"
    for name in [*names, "C"]:
        env = {**os.environ, "LC_ALL": name}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.stdout.strip() == float_literal(0.1), done.stderr


def _has(name):
    old = locale.setlocale(locale.LC_NUMERIC)
    try:
        locale.setlocale(locale.LC_NUMERIC, name)
        return True
    except locale.Error:
        return False
    finally:
        locale.setlocale(locale.LC_NUMERIC, old)


# --- what a template may read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["../secret.cuh", "/etc/hostname", "a/../../secret.cuh", "..\\secret.cuh", "", "./inc.cuh"]
)
@pytest.mark.parametrize("statement", ['{{{{ include("{}") }}}}', '{{% include "{}" %}}', '{{% import "{}" as m %}}'])
def test_paths_that_leave_the_package(tmp_path, path, statement):
    (tmp_path / "secret.cuh").write_text("secret\n")
    error = fails(tmp_path, statement.format(path.replace("\\", "\\\\")) + "\n" + BODY % "")
    assert "secret" not in str(error).replace("secret.cuh", "")


def test_links_out_of_the_package_are_not_followed(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret words\n")
    entry = plugin_kit.entry(tmp_path)
    (entry.kernels[0].root / "link.cuh").symlink_to(secret)
    (entry.kernels[0].root / "k.cu.j2").write_text('{{ include("link.cuh") }}\n' + BODY % "")
    with pytest.raises(RenderError, match="link") as caught:
        rendered(entry)
    assert "secret words" not in str(caught.value)


def test_a_missing_include_offers_the_nearest(tmp_path):
    assert "did you mean" in str(fails(tmp_path, '{{ include("redduce.cuh") }}\n' + BODY % ""))


def test_control_characters_in_a_template(tmp_path):
    assert "control character" in str(fails(tmp_path, "// \x02k:1\x03\n" + BODY % ""))


def test_a_header_is_included_once(tmp_path):
    template = '{{ include("a.cuh") }}{{ include("a.cuh") }}{{ include("reduce.cuh") }}\n' + plugin_kit.ADD_RELU
    source = rendered(plugin_kit.entry(tmp_path, template, {"a.cuh.j2": "struct Once {};\n"}))
    assert source.text.count("struct Once") == 1 and source.text.count("namespace fr") >= 2


# --- an edit shows, even with an unchanged time stamp ----------------------------------------------------------------


@pytest.mark.parametrize("path", ["k.cu.j2", "inc.cuh"])
def test_an_edited_template_or_partial_changes_the_unit(tmp_path, path):
    entry = plugin_kit.entry(tmp_path, '{{ include("inc.cuh") }}\n' + plugin_kit.ADD_RELU, {"inc.cuh": "// header\n"})
    before = rendered(entry)
    file = entry.kernels[0].root / path
    stamp = file.stat()
    file.write_text(file.read_text() + "// edited\n")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (entry.kernels[0].root / "README.md").write_text("docs")
    (entry.kernels[0].root / "other.cu.j2").write_text("another template")
    after = rendered(entry)
    assert before.digest != after.digest and "// edited" in after.text
    assert rendered(entry).digest == after.digest
