"""B12: the sampled stop token is trained on like any other, also where the tokenizer pads with it."""

from pathlib import Path

import numpy as np
import pytest

from cauce.algorithms.advantages import make_batch, train_sequences
from cauce.learner.learner import Learner
from cauce.packing import pack
from tests.engine.asking import ask, engine_of
from tests.learner.cases import algorithm, group_of, loaded, sequence, settings
from tests.tiny import EOS_ID

PROMPT = [1, 2, 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose pad token is its end token."""
    path = tmp_path / "model"
    model = loaded(path)
    model.tokenizer.pad_token = model.tokenizer.eos_token
    model.tokenizer.save_pretrained(path)
    assert loaded(path).tokenizer.pad_token_id == EOS_ID
    return path


def learner(folder: Path, **changes: object) -> Learner:
    return Learner(
        loaded(folder), algorithm=algorithm(), settings=settings(**changes), temperature=1.0, total_steps=100
    )


def test_the_stop_token_is_in_the_loss_and_nothing_behind_it(folder: Path) -> None:
    """B12: answers of unequal length; every sampled token is a target once, the stop token too, and no pad is."""
    answers = [[5, 6, EOS_ID], [7, EOS_ID], [8, 9, 10, 11], [EOS_ID]]
    each = learner(folder)
    sequences = train_sequences(algorithm(), each.score([group_of(0, PROMPT, answers)], proximal=False))
    batch = make_batch(sequences)
    (packed,) = pack(sequences, 100)
    assert sorted(packed.target_M.tolist()) == sorted(token for answer in answers for token in answer)
    assert [s.mask.tolist() for s in sequences] == [[1] * len(answer) for answer in answers]
    assert [s.advantages[-1] == s.advantages[0] != 0 for s in sequences] == [True] * 4
    assert each.forward_backward(batch)["learner/tokens"] == 10


def test_rewarded_for_stopping_the_model_stops(folder: Path) -> None:
    """B12: one row that ends in the stop token, trained on until greedy decoding gives it back and ends."""
    answer = [5, 6, EOS_ID]
    before = engine_of(folder).generate([ask(0, PROMPT, max_tokens=12, temperature=0.0)])[0]
    assert before.token_ids.tolist() != answer
    each = learner(folder, lr=0.01)
    made = sequence(0, PROMPT, answer, advantages=np.ones(3, np.float32))
    for _ in range(60):
        each.forward_backward(make_batch([made]))
        each.optim_step()
    each.save_model(folder.parent / "trained")
    after = engine_of(folder.parent / "trained").generate([ask(0, PROMPT, max_tokens=12, temperature=0.0)])[0]
    assert after.token_ids.tolist() == answer
    assert after.finish_reason == "stop"
