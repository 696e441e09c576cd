"""Existing work runs unchanged: a TRL data set with its reward functions, a verl parquet with its
compute_score.

Both are written as their users write them, against nothing but the conventions of those trainers, and go the
whole way: rows, prompts as the model sees them, tokens of an answer back to text, scores.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cauce.data.order import row_index
from cauce.data.source import RowSource, load_rows
from cauce.environments.single_turn import SingleTurn
from cauce.recipe.models import DataSettings, RewardSettings
from cauce.rewards.load import load_reward
from cauce.rewards.reward import Reward, RewardResult
from tests.tiny import EOS_ID, byte_tokenizer

TRL_REWARDS = """
import re

def accuracy_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    scores = []
    for content, gold in zip(contents, solution):
        if gold is None:
            scores.append(None)
            continue
        found = re.search(r"<answer>(.*?)</answer>", content, re.DOTALL)
        scores.append(1.0 if found and found.group(1).strip() == gold else 0.0)
    return scores


async def format_reward(prompts, completions, completion_ids, trainer_state, log_metric=None, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert len(completion_ids) == len(completions) == len(kwargs["difficulty"])
    if log_metric:
        log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    pattern = re.compile(r"^<think>.*?</think>\\\\s*<answer>.*?</answer>$", re.DOTALL)
    return [1.0 if pattern.match(completion[0]["content"]) else 0.0 for completion in completions]
""".replace("\\\\s", "\\s")

VERL_SCORE = """
import re

def extract(text):
    found = re.findall(r"#### (\\-?[0-9\\.\\,]+)", text)
    return found[-1].replace(",", "").replace("$", "") if found else None

def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0, score=1.0):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"no reward for {data_source=}")
    answer = extract(solution_str)
    if answer is None:
        return {"score": 0, "acc": 0.0, "index": extra_info["index"]}
    right = answer == ground_truth
    return {"score": score if right else format_score, "acc": float(right), "index": extra_info["index"]}
"""


def through(source: RowSource, environment: SingleTurn, reward: Reward, answers: list[list[str]]) -> RewardResult:
    """Score answers to the rows in order, each as tokens that end in the stop token."""
    tokenizer = byte_tokenizer()
    rows, texts, ids = [], [], []
    for row, group in zip(source, answers, strict=True):
        assert len(environment.render(row).token_ids) > 0
        for answer in group:
            tokens = [*tokenizer(answer).input_ids, EOS_ID]
            rows.append(row)
            ids.append(tokens)
            texts.append(environment.answer_text(tokens, environment.stop_token_ids([])))
    return reward.score(rows=rows, texts=texts, token_ids=ids, step=5, max_steps=10)


def values(result: RewardResult) -> list[float | None]:
    return [outcome.value for outcome in result.outcomes]


def test_a_trl_dataset_with_its_reward_functions(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Answer in tags."}
    dataset = [
        {
            "prompt": [system, {"role": "user", "content": f"{n} + 1?"}],
            "solution": str(n + 1) if n < 2 else None,
            "difficulty": n,
        }
        for n in range(3)
    ]
    (tmp_path / "rewards.py").write_text(TRL_REWARDS)
    settings = DataSettings()
    source = load_rows(dataset, settings=settings, split="train")
    assert (source.shape, source.gold(source[0])) == ("trl", "1")
    environment = SingleTurn(byte_tokenizer(), settings)
    assert environment.render(source[0]).text == (
        "<|im_start|>system\nAnswer in tags.<|im_end|>\n<|im_start|>user\n0 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    file = tmp_path / "rewards.py"
    reward = load_reward(RewardSettings(fn=[f"{file}:accuracy_reward", f"{file}:format_reward"], weights=[1.0, 0.5]))
    good = "<think>easy</think>\n<answer>{}</answer>"
    answers = [[good.format(1), "<answer>1</answer>"], [good.format(7), ""], [good.format(3), "3"]]
    result = through(source, environment, reward, answers)
    assert values(result) == [1.5, 1.0, 0.5, 0.0, 0.5, 0.0]  # no solution: the format alone
    assert result.outcomes[4].parts == {"accuracy_reward": None, "format_reward": 1.0}
    assert result.metrics == {"reward/format_reward/progress": 0.5}


def test_a_verl_parquet_with_its_compute_score(tmp_path: Path) -> None:
    def record(index: int, data_source: str) -> dict[str, Any]:
        question = f"{index} + 1?"
        return {
            "data_source": data_source,
            "prompt": np.array([{"role": "user", "content": question}], dtype=object),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
            "extra_info": {
                "split": "train",
                "index": index,
                "answer": f"#### {index + 1}",
                "question": question,
            },
        }

    rows = [record(1041, "openai/gsm8k"), record(6, "openai/gsm8k"), record(7, "someone/else")]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "score.py").write_text(VERL_SCORE)
    settings = DataSettings(train=str(tmp_path / "*.parquet"))
    source = load_rows(settings.train, settings=settings, split="train")
    assert (source.shape, [source.gold(row) for row in source]) == ("verl", ["1042", "7", "8"])
    environment = SingleTurn(byte_tokenizer(), settings)
    reward = load_reward(RewardSettings(fn=str(tmp_path / "score.py"), kwargs={"format_score": 0.1}))
    assert reward.names == ("compute_score",)
    answers = [["so #### 1,042\nindeed", "#### 3"], ["7", "#### 7"], ["#### 8", "#### 9"]]
    result = through(source, environment, reward, answers)
    assert values(result) == [1.0, 0.1, 0.0, 1.0, None, None]
    assert [outcome.status for outcome in result.outcomes[4:]] == ["failed", "failed"]
    assert "no reward for data_source='someone/else'" in result.outcomes[4].detail
    assert result.metrics == {"reward/compute_score/acc": 0.5, "reward/compute_score/index": (1041 + 6) / 2}


def test_columns_stay_with_their_row_after_shuffle_and_repeat(tmp_path: Path) -> None:
    """F13."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n), "hint": [n]}) + "\n" for n in range(9)))
    source = load_rows(str(path), settings=DataSettings(), split="train")
    admitted = [source[row_index(n, len(source), 3, True)] for n in range(20)]
    repeated = [row for row in admitted for _ in range(2)]
    seen: list[tuple[str, str, list[int]]] = []

    def spy(prompts, completions, answer, hint):
        seen.extend(zip(prompts, answer, hint, strict=True))
        return [0.0] * len(completions)

    reward = load_reward(spy)
    reward.score(rows=repeated, texts=["x"] * 40, token_ids=[[1]] * 40, step=1, max_steps=1)
    assert len(seen) == 40
    assert all(prompt == f"{answer}?" and hint == [int(answer)] for prompt, answer, hint in seen)
    assert len({prompt for prompt, _, _ in seen[:18]}) == 9
