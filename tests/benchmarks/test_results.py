"""Figures and the file they are kept in."""

import json
from pathlib import Path

import pytest
from benchmarks.results import RESULTS, Result, merge, read


def result(**changes: object) -> Result:
    values = {"ours": 2.0, "peer": 12.0, "unit": "s", "dtype": "bf16", "runs": 3} | changes
    return Result(**values)  # type: ignore[arg-type]  # a test's shorthand


def entry(of: Result) -> dict[str, object]:
    return of.entry({"cpus": 2}, 61.7, "2030-01-01")


def test_ratio_is_how_many_times_better_we_are() -> None:
    assert result().ratio == 6.0
    assert result(ours=0.6, peer=0.4, better="higher").ratio == pytest.approx(1.5)
    assert result(ours=0.002, peer=0.01, unit="fraction").ratio == pytest.approx(5.0)
    assert result(ours=8.0, peer=4.0).ratio == 0.5
    assert result(peer=None).ratio is None


@pytest.mark.parametrize("changes", [{"ours": 0.0}, {"ours": 1.0, "peer": 0.0, "better": "higher"}, {"ours": -1.0}])
def test_a_ratio_of_nothing_is_an_error_and_no_infinity(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a ratio needs numbers above 0"):
        _ = result(**changes).ratio


def test_an_entry_has_the_promised_keys_and_four_digits() -> None:
    made = entry(result(ours=1 / 3, spread={"ours": [0.123456, 7]}, detail={"deep": {"list": (2 / 3, "x")}}))
    assert {"ours", "peer", "ratio", "unit", "dtype", "runs"} <= made.keys()
    assert made["ours"] == 0.3333
    assert made["ratio"] == 36.0
    assert made["spread"] == {"ours": [0.1235, 7]}
    assert made["detail"] == {"deep": {"list": [0.6667, "x"]}}
    assert (made["machine"], made["took_s"], made["measured"]) == ({"cpus": 2}, 62, "2030-01-01")


def test_measuring_one_again_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    merge({"b": entry(result()), "a": entry(result(ours=3.0))}, path)
    merge({"b": entry(result(ours=4.0))}, path)
    found = read(path)
    assert list(found) == ["a", "b"]
    assert (found["a"]["ours"], found["b"]["ours"], found["b"]["ratio"]) == (3.0, 4.0, 3.0)
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_a_number_that_json_lacks_does_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    merge({"a": entry(result())}, path)
    with pytest.raises(ValueError, match="JSON compliant"):
        merge({"a": {"ours": float("nan")}}, path)
    assert read(path)["a"]["ours"] == 2.0


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="delete it to start anew"):
        read(path)
    assert read(tmp_path / "missing.json") == {}


def test_sentence_names_the_other_side() -> None:
    assert result(peer_is="TRL").sentence() == "2 s, TRL 12: 6 times better (bf16)"
    assert result(peer=None, dtype="").sentence() == "2 s"


@pytest.mark.skipif(not RESULTS.exists(), reason="nothing was measured in this checkout")
def test_committed_figures_are_whole() -> None:
    for name, found in json.loads(RESULTS.read_text()).items():
        assert {"ours", "peer", "ratio", "unit", "dtype", "runs", "machine"} <= found.keys(), name
        if found["peer"] is not None:
            better = found["peer"] / found["ours"]
            ratio = better if found["better"] == "lower" else 1 / better
            assert found["ratio"] == pytest.approx(ratio, rel=2e-3), name
