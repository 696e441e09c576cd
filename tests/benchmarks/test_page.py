"""docs/performance.md says what results.json says, and its pictures show it."""

from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.bars import Bar, axis_of, bars
from benchmarks.heat_map import Panel, heat_map
from benchmarks.page import DOCS, FIGURES, MARKER, PAGE, PARTS, pictures, rendered, surface, table
from benchmarks.results import RESULTS, Result, read
from benchmarks.run import MEASUREMENTS

SPACE = "{http://www.w3.org/2000/svg}"
MACHINE = {"cpus": 2, "cpu": "C", "instructions": ["avx2"], "memory_gb": 8, "python": "3", "torch": "2"}


def entry(name: str, ratio: float, **changes: Any) -> dict[str, Any]:
    result = Result(ours=ratio, peer=1.0, unit="u", dtype="bf16", runs=1, better="higher", peer_is="P", **changes)
    return {name: result.entry({**MACHINE, "transformers": "5"}, 1.0, "2030-01-01")}


@pytest.mark.skipif(not RESULTS.exists(), reason="nothing was measured in this checkout")
def test_page_and_pictures_are_those_of_the_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {match.group(1) for match in MARKER.finditer(text)} == PARTS.keys()
    assert rendered(text, read(RESULTS)) == text, "run `python -m benchmarks.page`"
    for name, picture in pictures(read(RESULTS)).items():
        assert (DOCS / "assets" / name).read_text(encoding="utf-8") == picture, "run `python -m benchmarks.page`"


def test_text_beside_the_markers_holds_no_ratio_or_time() -> None:
    text = MARKER.sub("", PAGE.read_text(encoding="utf-8"))
    assert "x faster" not in text
    assert not [word for word in text.split() if word.rstrip(".,)").endswith("x") and word[0].isdigit()]


def test_the_page_explains_every_measured_ratio() -> None:
    text = MARKER.sub("", PAGE.read_text(encoding="utf-8"))
    compared = [name for name in MEASUREMENTS if "_vs_" in name and name != "reward_curve_vs_trl"]
    assert set(compared) <= FIGURES.keys()
    assert all(f"`{name}`" in text or name.startswith("grpo_step_vs_trl_") for name in compared)


def test_a_row_says_ratio_spread_target_and_share_of_the_limit() -> None:
    entries = {
        **entry("generate_vs_vllm", 1.3, spread={"ratio": [1.1, 1.5]}),
        **entry("decode_vs_gemm", 0.43),
    }
    rows = [line for line in table(entries).splitlines() if line.startswith("| Gen")]
    assert rows == [
        "| Generation, against vLLM (`generate_vs_vllm`) | 1.3 u | 1, P | **1.3x** (1.1 to 1.5) | 1.25x | "
        "decode 43 % | bf16 |"
    ]
    assert "`learner_vs_gemm`" in table(entries).rpartition("Not measured yet")[2]


def test_only_the_marked_parts_change() -> None:
    page = "before\n<!-- generated: machine -->\nold\n<!-- end -->\nafter\n"
    made = rendered(page, entry("decode_vs_gemm", 0.5))
    assert made.startswith("before\n<!-- generated: machine -->\n- 2 x C (avx2), 8 GB")
    assert made.endswith("2030-01-01\n<!-- end -->\nafter\n")
    assert rendered(made, entry("decode_vs_gemm", 0.5)) == made
    with pytest.raises(ValueError, match="a part 'tabel'"):
        rendered("<!-- generated: tabel -->\n<!-- end -->", {})


def test_bars_start_at_even_and_end_at_their_ratio() -> None:
    svg = bars([Bar(label="A & B", value=2.0, target=5.0), Bar(label="C", value=0.5)], title="T")
    root = ElementTree.fromstring(svg)
    drawn = {rect.attrib["class"]: rect for rect in root.iter(f"{SPACE}rect") if "class" in rect.attrib}
    even = next(float(line.attrib["x1"]) for line in root.iter(f"{SPACE}line") if line.attrib["class"] == "even")
    ahead, behind = drawn["ahead"], drawn["behind"]
    assert float(ahead.attrib["x"]) == even
    assert float(behind.attrib["x"]) + float(behind.attrib["width"]) == pytest.approx(even, abs=0.2)
    assert float(ahead.attrib["width"]) == pytest.approx(float(behind.attrib["width"]), abs=0.2)  # a factor of 2 each
    assert {"A & B", "2x", "0.5x", "1x"} <= {text.text for text in root.iter(f"{SPACE}text")}
    with pytest.raises(ValueError, match="at least 1"):
        bars([], title="")


def test_an_axis_reaches_around_all_numbers() -> None:
    assert axis_of(0.3, 4.0) == (0.25, 0.5, 1.0, 2.0, 5.0)
    assert axis_of(3.0, 12.0)[0] == 1.0
    assert axis_of(0.9, 0.95) == (0.5, 1.0, 2.0)


def test_a_surface_has_a_cell_for_each_ratio() -> None:
    ratios = {f"{prompt}/{answer}/{size}": 1.0 + size for prompt in (16, 44) for answer in (24,) for size in (1, 8)}
    root = ElementTree.fromstring(surface(ratios))
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert texts.count("2x") == texts.count("9x") == 2
    assert {"1 answer to a prompt", "8 answers to a prompt", "16", "44", "24"} <= set(texts)


def test_a_cell_below_one_stands_out() -> None:
    panel = Panel(title="p", rows=("r",), columns=("a", "b", "c"), values=((0.5, 4.0, None),))
    root = ElementTree.fromstring(heat_map([panel], title="T", x_name="x", y_name="y"))
    fills = [rect.attrib["fill"] for rect in root.iter(f"{SPACE}rect")][1:]
    assert fills == ["rgb(253,186,116)", "rgb(29,78,216)"]
    with pytest.raises(ValueError, match="at least 1 panel"):
        heat_map([], title="", x_name="", y_name="")
