"""New weights in a running engine: versions, stale prompts, names."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cauce.errors import WeightsError
from tests.engine.asking import ask, engine_of, plain_logps, plain_model, random_prompt, same
from tests.tiny import tiny_model


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in plain_model(folder).named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2"])
def test_new_weights_are_used_for_a_prompt_seen_before(tmp_path: Path, kind: str) -> None:
    # D1, D2; tied and untied heads both follow.
    old, new = (tiny_model(tmp_path / str(seed), kind, seed=seed) for seed in (1, 2))
    engine = engine_of(old)
    request = ask(0, random_prompt(10), samples=3)
    engine.generate([request])
    engine.load_state(state_of(new), version=1, lineage="main")
    answers = engine.generate([request])
    for completion in answers:
        np.testing.assert_allclose(completion.logps, plain_logps(plain_model(new), request, completion), atol=1e-5)
        assert completion.versions.tolist() == [1] * len(completion.token_ids)
    assert all(same(a, b) for a, b in zip(answers, engine_of(new).generate([request]), strict=True))


def test_waiting_samples_of_a_half_admitted_group_get_a_fresh_prompt(tmp_path: Path) -> None:
    # B14; D2 again: the prompt was prefilled under version 0 and two of its samples start under version 1.
    old, new = (tiny_model(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    engine = engine_of(old, slots=2)
    request = ask(0, random_prompt(10), samples=4, max_tokens=5)
    engine.submit(request)
    done = engine.step()
    engine.load_state(state_of(new), version=1, lineage="main")
    while not engine.is_idle:
        done += engine.step()
    by_index = {c.index: c for c in done}
    assert [by_index[i].versions.tolist() for i in range(4)] == [[0, 0, 1, 1, 1]] * 2 + [[1] * 5] * 2
    assert [by_index[i].mask.tolist() for i in range(4)] == [[1] * 5] * 4  # sampled by us, whichever version
    for index in (2, 3):
        completion = by_index[index]
        np.testing.assert_allclose(completion.logps, plain_logps(plain_model(new), request, completion), atol=1e-5)
    for index in (0, 1):  # the tokens drawn under version 0 carry version 0's log-probs
        completion = by_index[index]
        expected = plain_logps(plain_model(old), request, completion)
        np.testing.assert_allclose(completion.logps[:2], expected[:2], atol=1e-5)
        assert abs(completion.logps[3] - expected[3]) > 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update({"model.layers.0.mlp.extra.weight": s.pop("model.layers.0.mlp.up_proj.weight")}),
         r"mlp\.up_proj.*mlp\.extra"),
        (lambda s: s.pop("model.norm.weight"), r"model\.norm\.weight"),
        (lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"]}), "lm_head.*tied param"),
        (lambda s: s.update({f"module.{name}": s.pop(name) for name in list(s)}), r"module\..*DDP"),
        (lambda s: s.update({f"_orig_mod.{name}": s.pop(name) for name in list(s)}), r"_orig_mod\..*compile"),
        (lambda s: s.update({"model.norm.weight": torch.ones(31)}), r"model\.norm\.weight is .*31"),
        (lambda s: s.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}), "int64"),
    ],
)  # fmt: skip
def test_wrong_names_and_shapes_are_named_and_change_nothing(tmp_path: Path, change, words: str) -> None:
    # D3, D4
    engine = engine_of(tiny_model(tmp_path / "1", "llama_tied", seed=1))
    request = ask(0, random_prompt(10), samples=2)
    before = engine.generate([request])
    state = state_of(tiny_model(tmp_path / "2", "llama_tied", seed=2))
    change(state)
    with pytest.raises(WeightsError, match=words):
        engine.load_state(state, version=7, lineage="main")
    assert (engine.version, engine.lineage) == (0, "")
    assert all(same(a, b) for a, b in zip(before, engine.generate([request]), strict=True))
