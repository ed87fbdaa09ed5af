"""Lines of a rendered unit: where a compiler's message points."""

from __future__ import annotations

from pathlib import Path

import plugin_kit
from hypothesis import given
from hypothesis import strategies as st
from rendering import rendered

from fusionreg.core.render.lines import mark, resolve

# --- lines -----------------------------------------------------------------------------------------------------------


def places(text):
    """What a compiler reports for every line: (file, line) → text, by the rules of ``#line``."""
    found, file, line = {}, "", 1
    for raw in text.split("\n"):
        if raw.startswith("#line "):
            number, file = raw[6:].split(" ", 1)
            line = int(number)
            continue
        found.setdefault((Path(file.strip('"')).name, line), raw)
        line += 1
    return found


TRICKY = """\
{#- a comment
   of two lines -#}
{% set table = {
  "a": 1,
} %}
int after_set;
{% for i in [1, 2] %}
int loop_{{ i }}_a;
int loop_{{ i }}_b;
{% endfor %}
{% macro twice(name) %}
int {{ name }}_1;
int {{ name }}_2;
{% endmacro %}
{{ twice("macro") }}
int after_macro;
#define LONG(a) \\
  {% if true %}
  (a + \\
  {% endif %}
   1)
int after_define;
/* a comment
{% if true %}
   goes on
{% endif %}
*/
int after_comment;
{% if false %}
int never;
{% else %}
int otherwise;
{% endif %}
{{ include("inc.cuh") }}
int after_include;
const char* text = R"(
{% if true %}
raw
{% endif %}
)";
int after_raw;
{%- if true %}

int stripped;
{%- endif +%}
{{ "int expression;" }}
{{ signature }} {
  y[0] = x[0] + bias[0] + __half(float(M * N));
}
"""


def test_every_line_is_reported_where_it_stands(tmp_path):
    entry = plugin_kit.entry(tmp_path, TRICKY, {"inc.cuh.j2": "// one\nint in_include;\n"})
    found = places(rendered(entry).text)
    lines = TRICKY.split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("int ") and "{{" not in line and "never" not in line:
            assert found.get(("k.cu.j2", number), "").strip() == line, (number, line)
    assert found["inc.cuh.j2", 2] == "int in_include;"
    assert found["k.cu.j2", 9] == "int loop_1_b;"
    assert found["k.cu.j2", lines.index('{{ "int expression;" }}') + 1] == "int expression;"
    assert 'extern "C"' in found["k.cu.j2", lines.index("{{ signature }} {") + 1]


def test_directives_stand_where_they_change_nothing(tmp_path):
    entry = plugin_kit.entry(tmp_path, TRICKY, {"inc.cuh.j2": "// one\nint in_include;\n"})
    text = rendered(entry).text
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if line.startswith("#line"):
            assert not lines[i - 1].endswith("\\")
    raw = text[text.index('R"(') : text.index(')";')]
    comment = text[text.index("/* a comment") : text.index("*/", text.index("/* a comment"))]
    assert "#line" not in raw and "#line" not in comment


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 9)), min_size=1, max_size=20))
def test_marks_resolve_to_the_lines_they_name(marks):
    text = resolve("\n".join(f"{mark(file, line)}int v{i};" for i, (file, line) in enumerate(marks)))
    seen, file, number = [], "", 1
    for raw in text.split("\n"):
        if raw.startswith("#line "):
            number, file = int(raw.split()[1]), raw.split('"')[1]
            continue
        if raw:
            seen.append((file, number))
        number += 1
    assert seen == marks
