"""The example runs, is short, and computes the same update as Cauce's learner."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from cauce.algorithms.advantages import group_advantages
from cauce.algorithms.table import resolve
from cauce.learner.learner import Learner
from cauce.models.load import load_model
from cauce.recipe.models import AlgorithmSettings, LearnerSettings
from cauce.types import Completion, Group, Outcome, Sample
from tests.tiny import EOS_ID, tiny_model

ALGORITHM = resolve(AlgorithmSettings(aggregation="token_mean"), max_tokens=8, correction_needed=False)
EXAMPLE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_file_grpo"] = module
    spec.loader.exec_module(module)
    return module


def test_it_is_short_and_without_ray() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 250
    assert "import ray" not in text


def test_it_trains_a_model(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    command = [sys.executable, str(EXAMPLE), "--model", str(model), "--steps", "2", "--prompts", "2", "--group", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["step", "1"], ["step", "2"]]
    assert lines[2].startswith("23 + 45 = ?")


def test_its_advantages_are_ours(example: ModuleType) -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 5.0, 5.0, 5.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    got = example.advantages(rewards, groups)
    want = np.concatenate([group_advantages(rewards[:3].numpy(), "group_std"), np.zeros(3)])
    np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


def test_its_update_is_the_learners(example: ModuleType, tmp_path: Path) -> None:
    """Two programs that share no code for loss, packing or optimizer end with the same weights."""
    folder = tiny_model(tmp_path / "tiny")
    from transformers import AutoModelForCausalLM

    prompt = torch.tensor([5, 6, 7])
    answers = [torch.tensor([9, 10, EOS_ID]), torch.tensor([11, 12]), torch.tensor([13, 14, 15, 16])]
    rewards = [1.0, 0.0, 0.25]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rollout = example.pad([(prompt, answer) for answer in answers], rewards, [0, 0, 0])
    example.update(plain, optimizer, rollout, 0.7)

    learner = Learner(
        load_model(str(folder), dtype=torch.float32, attention="sdpa"),
        algorithm=ALGORITHM,
        settings=LearnerSettings(dtype="fp32"),
        temperature=0.7,
        total_steps=1,
    )
    before = {name: tensor.clone() for name, tensor in learner.weights(torch.float32).items()}
    learner.forward_backward(_batch(prompt, answers, rewards))
    gradients = dict(learner._weights.named_gradients())
    norm = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
    scale = min(1.0, 1.0 / float(norm))
    moved = dict(plain.named_parameters())
    for name, gradient in gradients.items():
        torch.testing.assert_close(moved[name], before[name] - 0.1 * scale * gradient, atol=2e-6, rtol=1e-4)


def _batch(prompt: torch.Tensor, answers: list[torch.Tensor], rewards: list[float]):
    from cauce.algorithms.advantages import make_batch, train_sequences
    from cauce.types import ScoredBatch

    samples = tuple(
        Sample(
            completion=Completion(
                task=0,
                index=i,
                attempt=1,
                token_ids=answer.numpy().astype(np.int32),
                logps=np.full(len(answer), -1.0, np.float32),
                versions=np.zeros(len(answer), np.int32),
                mask=np.ones(len(answer), np.uint8),
                finish_reason="stop",
            ),
            outcome=Outcome(status="scored", value=reward, parts={}, detail=""),
        )
        for i, (answer, reward) in enumerate(zip(answers, rewards, strict=True))
    )
    group = Group(task=0, prompt_ids=prompt.numpy().astype(np.int32), samples=samples)
    scored = ScoredBatch(groups=(group,), proximal_logps=None, reference_logps=None)
    return make_batch(train_sequences(ALGORITHM, scored))
