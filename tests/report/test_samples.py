"""What the report takes from a journal."""

import json
from pathlib import Path

import numpy as np
import pytest

from cauce.report.samples import load_journal, load_samples, token_texts
from tests.report.run_folder import GROUP_SIZE, HOSTILE, TOKENIZER, UNICODE, make_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", num_plans=14)


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def test_samples_come_from_across_the_run_in_whole_groups(run_dir: Path) -> None:
    samples = load_samples(run_dir, 48)
    assert len(samples) == 48
    plans = sorted({sample.plan for sample in samples})
    assert (plans[0], plans[-1], len(plans)) == (1, 14, 12)
    assert [sample.index for sample in samples[:GROUP_SIZE]] == list(range(GROUP_SIZE))
    assert len({sample.task for sample in samples[:GROUP_SIZE]}) == 1


def test_a_sample_is_what_the_journal_holds(run_dir: Path) -> None:
    first = load_samples(run_dir, 48)[0]
    assert first.prompt_text == "What is 0 + 2?"
    assert "".join(first.tokens) == "The answer is 2.<|im_end|>"
    assert np.exp(first.logps) == pytest.approx(np.linspace(0.99, 0.05, 17), abs=1e-3)
    assert (first.reward, first.status, first.finish_reason) == (1.0, "scored", "stop")


def test_a_failed_reward_is_no_number(run_dir: Path) -> None:
    failed = load_samples(run_dir, 48)[3]
    assert (failed.reward, failed.status, failed.finish_reason) == (None, "failed", "length")


def test_limit_below_one_group_per_plan_holds(run_dir: Path) -> None:
    assert len(load_samples(run_dir, 10)) == 10
    assert load_samples(run_dir / "eval", 10) == []


def test_long_answers_mean_fewer_samples(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cauce.report.samples.MAX_TOKENS", 700)
    samples = load_samples(run_dir, 96)
    assert len({sample.plan for sample in samples}) == 12
    assert sum(len(sample.tokens) for sample in samples) <= 700


def test_rewards_of_the_first_and_last_plans_and_events(run_dir: Path) -> None:
    view = load_journal(run_dir, 48)
    assert view is not None
    assert view.first_rewards == {1: [1.0, 0.0, 0.0] * 2}
    assert view.last_rewards == {14: [1.0, 0.0, 0.0] * 2}
    assert [event.kind for event in view.events] == ["death"]
    assert json.loads(view.meta["fingerprint"])["threads"] == 2


def test_payloads_that_are_no_longer_kept_cost_only_their_samples(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_plans=2)
    for payload in (run_dir / "payloads").iterdir():
        payload.unlink()
    view = load_journal(run_dir, 48)
    assert view is not None
    assert (view.samples, view.first_rewards, view.last_rewards, view.num_unkept) == ([], {}, {}, 4)


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_plans=1)
    (run_dir / "model").rename(run_dir / "elsewhere")
    first = load_samples(run_dir, 8)[0]
    assert first.tokens[-1] == "<258>"
    assert len(first.tokens) == 17


@pytest.mark.parametrize("text", ["", "plain", UNICODE, HOSTILE, "\U0001f600" * 3, "\u00e9\u00e9"])
def test_token_texts_join_to_the_decoded_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = token_texts(decode, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_bytes_that_are_no_character_are_shown_as_such() -> None:
    ids = TOKENIZER.encode("\U0001f600", add_special_tokens=False)
    pieces = token_texts(decode, [*ids[:2], *TOKENIZER.encode("abcd", add_special_tokens=False)])
    assert "".join(pieces).endswith("abcd")
    assert "\ufffd" in "".join(pieces)
    assert "".join(token_texts(decode, ids[:3])) == decode(ids[:3])
