"""The native engine against transformers: tokens, log-probs, ends, and the order of things."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cauce.engine.native import NativeEngine
from cauce.errors import ModelError
from cauce.models.load import load_model
from cauce.types import Completion
from tests.engine.asking import ask, engine_of, mixed_requests, plain_logps, plain_model, random_prompt, same
from tests.tiny import EOS_ID, KINDS, tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tiny_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> Path:
    return folders["llama"]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(folders: dict[str, Path], kind: str) -> None:
    model = plain_model(folders[kind])
    engine = engine_of(folders[kind], slots=3)
    # Prompts shorter and longer than the sliding window of 8, decoded far past it.
    requests = [ask(n, random_prompt(n, 1), max_tokens=30, temperature=0.0) for n in (1, 7, 8, 9, 25)]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        ids = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=EOS_ID
        )
        assert completion.token_ids.tolist() == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_recorded_logps_are_those_of_a_plain_forward(folders: dict[str, Path], kind: str, deterministic: bool) -> None:
    # C1, C2, C6, C8: 21 samples of 7 prompts share 5 slots and join at different steps.
    model = plain_model(folders[kind])
    engine = engine_of(folders[kind], slots=5, deterministic=deterministic)
    requests = mixed_requests(7)
    asked = {request.task: request for request in requests}
    done: list[Completion] = []
    for request in requests:
        engine.submit(request)
        done += engine.step()
    while not engine.is_idle:
        done += engine.step()
    assert len(done) == 21
    for completion in done:
        expected = plain_logps(model, asked[completion.task], completion)
        np.testing.assert_allclose(completion.logps, expected, atol=1e-5)
        assert completion.logps.dtype == np.float32


def test_each_prompt_is_prefilled_once(llama: Path) -> None:
    engine = engine_of(llama, slots=3)
    engine.generate([ask(0, random_prompt(11), samples=8), ask(1, random_prompt(5), samples=4)])
    assert engine.status()["prefilled_tokens"] == 16


def test_samples_do_not_depend_on_the_engine_or_its_company(llama: Path) -> None:
    # D13, D14: what is sampled is a function of (run seed, task, index).
    requests = mixed_requests(6)
    crowd = engine_of(llama, slots=16).generate(requests)
    few = [c for r in reversed(requests) for c in engine_of(llama, slots=2).generate([r])]
    tokens = {(c.task, c.index): c.token_ids.tolist() for c in crowd}
    assert tokens == {(c.task, c.index): c.token_ids.tolist() for c in few}
    longest = max(crowd, key=lambda c: len(c.token_ids) if requests[c.task].sampling.temperature == 1.0 else 0)
    task, index = longest.task, longest.index
    retry = ask(task, requests[task].prompt_ids, samples=(index,), max_tokens=5)  # a new lease for one of three
    assert engine_of(llama, slots=2).generate([retry])[0].token_ids.tolist() == tokens[task, index][:5]
    assert len(tokens[task, index]) > 5


def test_seed_task_and_index_all_change_the_sample(llama: Path) -> None:
    prompt = random_prompt(6)

    def tokens(task: int, seed: int, samples: int = 2) -> list[tuple[int, ...]]:
        answers = engine_of(llama).generate([ask(task, prompt, samples=samples, max_tokens=12, seed=seed)])
        return [tuple(c.token_ids.tolist()) for c in answers]

    assert tokens(0, 1) == tokens(0, 1)
    assert len({*tokens(0, 1), *tokens(0, 2), *tokens(1, 1)}) == 6


def test_deterministic_is_bitwise_the_same_alone_and_in_a_crowd(llama: Path) -> None:
    crowd = mixed_requests(9, seed=3)
    crowd[4] = ask(4, random_prompt(120), samples=3, max_tokens=24)  # crosses a length bucket
    together = engine_of(llama, slots=12, deterministic=True).generate(crowd)
    by_key = {(c.task, c.index): c for c in together}
    for request in (crowd[1], crowd[4], crowd[8]):
        engine = engine_of(llama, slots=12, deterministic=True)
        engine.generate([ask(99, random_prompt(3), samples=5, max_tokens=2)])  # other rows, other stale content
        engine.submit(ask(98, random_prompt(40), max_tokens=9))
        engine.step()
        engine.cancel(98)
        for completion in engine.generate([request]):
            assert same(completion, by_key[completion.task, completion.index])


def test_every_stop_token_ends_a_sample_with_its_real_logp(folders: dict[str, Path]) -> None:
    # B10, B11: the stop token is sampled, kept, and judged by the ids asked for, not by eos alone.
    model = plain_model(folders["llama"])
    free = engine_of(folders["llama"]).generate([ask(0, random_prompt(9), samples=6, max_tokens=12)])
    ninth = int(free[0].token_ids[4])
    request = ask(0, random_prompt(9), samples=6, max_tokens=12, stop=(ninth, 7))
    for completion, unstopped in zip(engine_of(folders["llama"]).generate([request]), free, strict=True):
        stops = np.isin(unstopped.token_ids, [ninth, 7, EOS_ID])
        expected = int(np.argmax(stops)) + 1 if stops.any() else 12
        assert len(completion.token_ids) == expected
        assert completion.finish_reason == ("stop" if stops.any() else "length")
        assert completion.token_ids.tolist() == unstopped.token_ids[:expected].tolist()
        np.testing.assert_allclose(completion.logps, plain_logps(model, request, completion), atol=1e-5)
        assert completion.mask.tolist() == [1] * expected
    assert ninth in {int(c.token_ids[-1]) for c in engine_of(folders["llama"]).generate([request])}


def test_stop_at_the_limit_is_a_stop(llama: Path) -> None:
    first = engine_of(llama).generate([ask(0, [1, 2, 3], max_tokens=1)])[0]
    assert first.finish_reason == "length"
    again = engine_of(llama).generate([ask(0, [1, 2, 3], max_tokens=1, stop=(int(first.token_ids[0]),))])[0]
    assert again.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_context_limit(tmp_path: Path, kind: str) -> None:
    # C20: 16 positions, prompt 14: two tokens and "length"; 20 and 16 are given up, the others finish.
    folder = tiny_model(tmp_path, kind, context=16)
    requests = [ask(n, random_prompt(n), samples=2, max_tokens=8, temperature=0.0) for n in (20, 14, 16, 3)]
    done = engine_of(folder).generate(requests)
    assert [(c.task, len(c.token_ids), c.finish_reason) for c in done] == [
        (20, 0, "aborted"), (20, 0, "aborted"), (14, 2, "length"), (14, 2, "length"),
        (16, 0, "aborted"), (16, 0, "aborted"), (3, 8, "length"), (3, 8, "length"),
    ]  # fmt: skip


def test_sampled_ids_are_kept_as_sampled(llama: Path) -> None:
    # C12: ids come back as drawn; decoding and encoding special or broken bytes would change them.
    request = ask(0, random_prompt(4), max_tokens=60, temperature=2.0)
    completion = engine_of(llama).generate([request])[0]
    tokenizer = load_model(str(llama), dtype=torch.float32, attention="sdpa").tokenizer
    again = tokenizer(tokenizer.decode(completion.token_ids), add_special_tokens=False)["input_ids"]
    assert again != completion.token_ids.tolist()  # so that the next line says something
    np.testing.assert_allclose(completion.logps, plain_logps(plain_model(llama), request, completion), atol=1e-5)


def test_dropout_is_off(tmp_path: Path) -> None:
    # C11
    folder = tiny_model(tmp_path, "gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    loaded = load_model(str(folder), dtype=torch.float32, attention="sdpa")
    loaded.model.train()
    request = ask(0, random_prompt(9), samples=4)
    for completion in NativeEngine(loaded, slots=4).generate([request]):
        np.testing.assert_allclose(completion.logps, plain_logps(plain_model(folder), request, completion), atol=1e-5)


def test_progress_and_cancel(llama: Path) -> None:
    engine = engine_of(llama, slots=3)
    engine.submit(ask(5, random_prompt(4), samples=4, max_tokens=6))
    engine.submit(ask(6, random_prompt(5), samples=2, max_tokens=6))
    engine.step()  # first and second tokens of three samples
    assert engine.progress() == {5: 6, 6: 0}
    engine.cancel(5, indices=[0, 3])  # one live, one waiting
    done = []
    while not engine.is_idle:
        done += engine.step()
    assert sorted((c.task, c.index) for c in done) == [(5, 1), (5, 2), (6, 0), (6, 1)]
    engine.submit(ask(7, random_prompt(4)))
    engine.step()
    engine.cancel(7)
    assert engine.is_idle
    assert engine.step() == []


def test_requests_that_cannot_be_meant_are_refused(llama: Path) -> None:
    engine = engine_of(llama)
    engine.submit(ask(1, [1, 2], samples=(0, 1)))
    for request, words in (
        (ask(1, [1, 2], samples=(1, 2)), "in flight"),
        (ask(2, [1, 2], samples=(3, 3)), "each once"),
        (ask(2, [1, 9999]), "prompt_ids"),
        (ask(2, []), "prompt_ids"),
        (ask(2, [1], max_tokens=0), "max_tokens 0"),
        (ask(2, [1], temperature=-1.0), "temperature -1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.submit(request)


def test_weights_that_are_not_finite_stop_the_engine_with_words(llama: Path) -> None:
    engine = engine_of(llama)
    state = {name: p.clone() for name, p in engine._model.named_parameters()}
    state["model.norm.weight"][3] = float("nan")
    engine.load_state(state, version=1, lineage="x")
    with pytest.raises(ModelError, match="not finite"):
        engine.generate([ask(0, [1, 2, 3])])


def test_bf16_records_fp32_logps_near_its_own_forward(llama: Path) -> None:
    # C5: the log-softmax is float32 although the model computes in bf16.
    engine = engine_of(llama, dtype=torch.bfloat16)
    request = ask(0, random_prompt(12), samples=4, max_tokens=16)
    model = plain_model(llama).to(torch.bfloat16)
    for completion in engine.generate([request]):
        assert completion.logps.dtype == np.float32
        gap = np.abs(completion.logps - plain_logps(model, request, completion))
        assert gap.mean() < 0.05
