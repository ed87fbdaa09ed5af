"""Tables and the page of results: what stands in them, that nothing is left out, and that nothing can break out."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from fusionreg.core.bench import listing
from fusionreg.core.bench.page import page, write
from fusionreg.core.bench.results import Results
from fusionreg.core.errors import MissingDependencyError

VOID = {"meta", "br", "hr", "img"}


class Reader(HTMLParser):
    """Collects text and widths, and holds that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.widths: list[float] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if found := re.search(r"width: ([\d.]+)%", dict(attrs).get("style") or ""):
            self.widths.append(float(found[1]))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def test_the_page(found) -> None:
    pytest.importorskip("matplotlib")
    text = page(found)
    seen = read(text)
    for row in found.rows:
        assert row.workload in seen.text and f"problem {row.workload}" in seen.text
    assert "fusionreg on NVIDIA <Fake>" in seen.text and "RuntimeError: no <kernel> & no cry" in seen.text
    assert "differs: tensor_core differs: error 0.3" in seen.text
    assert "69% of the floor's rate" in seen.text and "1.25 × the best competitor" in seen.text
    assert "1.33 × the goal" in seen.text and "CUDA graph" in seen.text
    assert "2.95 of 4.39 TB/s (0% written)" in seen.text
    assert "copy 1:1 4.26 TB/s" in seen.text and "bfloat16 788, float16 760 TFLOP/s" in seen.text
    assert seen.tags.count("svg") == 1 and seen.tags.count("section") == 4
    assert "script" not in seen.tags and "<Fake>" not in text and "http" not in re.sub(r'xmlns[:\w]*="[^"]*"', "", text)


def test_bars_are_in_proportion(found) -> None:
    pytest.importorskip("matplotlib")
    widths = read(page(found)).widths
    assert widths[:6] == pytest.approx([80.0, 100.0, 100.0, 64.0, 64.0, 60.0])  # plain, 18 times longer, is cut off
    assert widths[6:9] == pytest.approx([80.0, 100.0, 100.0])


def test_the_roofline_is_an_svg(found) -> None:
    pytest.importorskip("matplotlib")
    text = page(found)
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    assert page(found) == text  # the same results give the same page


def test_nothing_measured_is_a_page_too() -> None:
    pytest.importorskip("matplotlib")
    assert "0 workloads" in read(page(Results(gpu="x"))).text


def test_instructions_where_they_were_counted(found) -> None:
    pytest.importorskip("matplotlib")
    row = found.rows[0].model_copy(
        update={"elements": 8192 * 8192, "instructions": 8192 * 8192, "counted_by": "code", "issue_ms": 1.9}
    )
    counted = found.model_copy(update={"rows": (row,)})
    text = page(counted)
    assert "at most 32 instructions an element, 1.9 ms to issue (binds)" in read(text).text
    assert 'class="mark issue"' in text and 'class="mark issue"' not in page(found)
    assert listing.line(row, ())[-2:] == ("32", "1.9*")
    (said,) = listing.remarks((row,))
    assert said == (
        "gemm.scale_bias 8192x8192x8192-bf16: 32 instructions an element take 1.9 ms to issue, more than the floor of "
        "1.38 ms"
    )
    hidden = row.model_copy(update={"issue_ms": 1.0, "counted_by": "ncu"})
    text = page(found.model_copy(update={"rows": (hidden,)}))
    assert "32 instructions an element, 1 ms to issue" in text and 'class="mark issue"' not in text
    assert "at most" not in text


def test_without_matplotlib_the_extra_is_named(found, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"fusionreg\[bench\]"):
        write(found, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_lines(found) -> None:
    peers = listing.peers_in(found.rows)
    assert peers == ("eager", "compile", "product", "epilogue")
    cells = dict(zip(listing.header(found.rows), listing.line(found.rows[0], peers), strict=True))
    assert cells == {
        "fusion": "gemm.scale_bias", "workload": "8192x8192x8192-bf16", "mode": "b", "kernel": "tensor_core",
        "ours ms": "2", "p20–p80": "1.98–2.04", "eager": "2.5", "compile": "1.6", "product": "1.6", "epilogue": "1.5",
        "floor": "1.38", "of floor": "69%", "÷ best": "1.25", "goal": "1.5", "÷ goal": "1.33",
        "instr/elem": "–", "issue": "–",
    }  # fmt: skip
    refused = dict(zip(listing.header(found.rows), listing.line(found.rows[2], peers), strict=True))
    assert refused["ours ms"] == "differs" and refused["÷ goal"] == "–"
    assert listing.remarks(found.rows) == [
        "gemm.scale_bias wrong: tensor_core differs: error 0.3",
        "gemm.scale_bias no-peer, compile: RuntimeError: no <kernel> & no cry",
    ]


def test_markdown_has_the_measured_rows_alone(found) -> None:
    lines = listing.markdown(found.rows).splitlines()
    assert len(lines) == 2 + 3 and all(x.count("|") == lines[0].count("|") for x in lines)
    assert lines[3].startswith("| `gemm.scale_bias` | 16x14336x4096-bf16 (graph) | tensor_core | 0.04 | 0.05 | – | – |")
    assert "| 2.5 | 1.6 | 1.5 epilogue | 1.38 | 69% |" in lines[2]
    marked = listing.markdown(found.rows, {found.rows[0].key}).splitlines()
    assert "8192x8192x8192-bf16 † |" in marked[2] and marked[3:5] == lines[3:5] and marked[-1].startswith("† measured")
    assert listing.markdown(found.rows, {found.rows[2].key}) == listing.markdown(found.rows)


def test_numbers() -> None:
    assert [listing.number(x) for x in (None, 0.0269, 1.5, 12345.6)] == ["–", "0.0269", "1.5", "12346"]
