"""vLLM against the plain forward and the native engine; run by the Python of vLLM's environment (`make test-vllm`).

fp32 on a CPU: log-probs within 1e-4 of the plain forward's; bf16: within 0.05 in the mean.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cauce.engine.native import NativeEngine
from cauce.errors import VersionGoneError, WeightsError
from cauce.types import Completion, GenerationRequest
from cauce.weights.store import WeightStore
from tests.engine.asking import ask, engine_of, plain_logps, plain_model, random_prompt
from tests.tiny import EOS_ID, tiny_model

pytestmark = pytest.mark.vllm

TOLERANCE_FP32 = 1e-4
TOLERANCE_BF16 = 0.05
SHAPE = {"hidden": 128, "heads": 4, "scale": 0.1, "context": 256}  # widths of heads that vLLM's attention takes
LONG_PROMPT = random_prompt(150)  # more than a page of vLLM's cache, which is what it would use again


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    first, second = (tiny_model(folder / str(seed), "llama_tied", seed=seed, **SHAPE) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="module")
def store(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    """Version 1 is the first model, 2 the second; 3 lacks a tensor, in 4 one has another shape, 5 has one too many."""
    store = WeightStore(tmp_path_factory.mktemp("store"), keep=9)
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    name = "model.layers.1.self_attn.k_proj.weight"
    store.publish(first, version=1, lineage="a")
    store.publish(second, version=2, lineage="a")
    store.publish({key: tensor for key, tensor in second.items() if key != name}, version=3, lineage="a")
    store.publish({**second, name: second[name][:, :-1]}, version=4, lineage="a")
    store.publish({**second, "model.layers.9.bias": torch.zeros(3)}, version=5, lineage="a")
    return store


@pytest.fixture(scope="module")
def loaded(folders: tuple[Path, Path]) -> object:
    from cauce.engine.vllm_engine import VllmEngine

    return VllmEngine(str(folders[0]), dtype="fp32", slots=8, compiled=False)


@pytest.fixture
def engine(loaded: object, store: WeightStore) -> Iterator[object]:
    """With version 1 in it, and nothing in flight before or after."""
    loaded.pull(store.folder, 1)
    yield loaded
    assert loaded.is_idle


def native(folder: Path) -> NativeEngine:
    return engine_of(folder, slots=8)


def assert_plain(folder: Path, requests: list[GenerationRequest], answers: list[Completion]) -> None:
    """Every recorded log-prob is that of the plain forward of this model."""
    model = plain_model(folder)
    asked = {request.task: request for request in requests}
    for answer in answers:
        expected = plain_logps(model, asked[answer.task], answer)
        np.testing.assert_allclose(answer.logps, expected, atol=TOLERANCE_FP32, rtol=0)


def test_logps_are_those_of_the_tokens_as_sampled(engine, folders: tuple[Path, Path]) -> None:
    requests = [
        ask(task, random_prompt(5 + 9 * task), samples=3, max_tokens=12, temperature=temperature)
        for task, temperature in enumerate((1.0, 0.6, 2.0, 0.0))
    ]
    answers = engine.generate(requests)
    assert [(a.task, a.index) for a in answers] == [(t, i) for t in range(4) for i in range(3)]
    assert_plain(folders[0], requests, answers)
    greedy = native(folders[0]).generate([requests[3]])
    assert [a.token_ids.tolist() for a in answers[9:]] == [a.token_ids.tolist() for a in greedy]
    assert len({a.token_ids.tobytes() for a in answers[:3]}) > 1


def test_drawn_tokens_have_the_models_distribution(engine, folders: tuple[Path, Path]) -> None:
    """2,000 first tokens of one prompt, each with a seed of its own, against the plain probabilities."""
    requests = [ask(task, [72, 105], samples=50, max_tokens=1) for task in range(40)]
    tokens = np.array([answer.token_ids[0] for answer in engine.generate(requests)])
    with torch.no_grad():
        expected = torch.softmax(plain_model(folders[0])(torch.tensor([[72, 105]])).logits[0, -1], -1).numpy()
    found = np.bincount(tokens, minlength=len(expected)) / len(tokens)
    spread = np.sqrt(expected * (1 - expected) / len(tokens))
    assert (np.abs(found - expected) < 5 * spread + 1e-3).all()
    assert 0.5 * np.abs(found - expected).sum() < 0.2  # 260 tokens, 2,000 draws: about 0.13 by chance


def test_a_sample_is_a_function_of_seed_task_and_index(engine) -> None:
    alone = engine.generate([ask(7, random_prompt(9), samples=(1,), max_tokens=12)])
    among = engine.generate([ask(task, random_prompt(9), samples=2, max_tokens=12) for task in (6, 7)])
    assert alone[0].token_ids.tolist() == among[3].token_ids.tolist()
    others = engine.generate([ask(7, random_prompt(9), samples=2, max_tokens=12, seed=1)])
    assert len({a.token_ids.tobytes() for a in (*among, *others)}) == 6


def test_ends(engine, folders: tuple[Path, Path]) -> None:
    greedy = ask(0, random_prompt(9), max_tokens=6, temperature=0.0)
    (full,) = engine.generate([greedy])
    assert (len(full.token_ids), full.finish_reason) == (6, "length")
    stop = int(full.token_ids[2])
    first = full.token_ids.tolist().index(stop) + 1
    (stopped,) = engine.generate([ask(0, random_prompt(9), max_tokens=6, temperature=0.0, stop=(stop,))])
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == (full.token_ids[:first].tolist(), "stop")
    assert len(stopped.logps) == len(stopped.versions) == first
    (aborted,) = engine.generate([ask(1, random_prompt(256))])
    assert (len(aborted.token_ids), aborted.finish_reason) == (0, "aborted")
    (cut,) = engine.generate([ask(2, random_prompt(253), max_tokens=9)])
    assert len(cut.token_ids) == 3 or cut.token_ids[-1] == EOS_ID


def test_new_weights_serve_at_once_and_for_prompts_seen_before(
    engine, store: WeightStore, folders: tuple[Path, Path]
) -> None:
    request = ask(0, LONG_PROMPT, samples=2, max_tokens=10, temperature=0.0)
    before = engine.generate([request])
    received = engine.pull(store.folder, 2)
    after = engine.generate([request])
    assert (received.version, received.lineage, received.checksum) == (2, "a", store.pull(2).checksum)
    assert (engine.version, engine.lineage) == (2, "a")
    assert {*before[0].versions.tolist()} == {1}
    assert {*after[0].versions.tolist()} == {2}
    for folder, answers in zip(folders, (before, after), strict=True):
        assert [a.token_ids.tolist() for a in answers] == [
            a.token_ids.tolist() for a in native(folder).generate([request])
        ]
        assert_plain(folder, [request], answers)


def test_an_answer_in_flight_goes_on_under_the_new_weights_alone(
    engine, store: WeightStore, folders: tuple[Path, Path]
) -> None:
    request = ask(0, LONG_PROMPT, samples=3, max_tokens=12)
    engine.submit(request)
    early = [answer for _ in range(5) for answer in engine.step()]
    assert early == []
    assert engine.progress() == {0: 15}
    engine.pull(store.folder, 2)
    answers = []
    while not engine.is_idle:
        answers += engine.step()
    first, second = map(plain_model, folders)
    assert sorted(a.index for a in answers) == [0, 1, 2]
    for answer in answers:
        assert answer.versions.tolist() == [1] * 5 + [2] * (len(answer.token_ids) - 5)
        expected = np.concatenate(
            [plain_logps(first, request, answer)[:5], plain_logps(second, request, answer)[5:]]
        )  # no key or value of the older weights is left
        np.testing.assert_allclose(answer.logps, expected, atol=TOLERANCE_FP32, rtol=0)


def test_cancelled_samples_make_no_answer_and_change_no_other(engine) -> None:
    kept = engine.generate([ask(1, random_prompt(9), max_tokens=12)])
    engine.submit(ask(0, random_prompt(7), samples=3, max_tokens=12))
    engine.submit(ask(1, random_prompt(9), max_tokens=12))
    engine.step()
    with pytest.raises(ValueError, match="none in flight already"):
        engine.submit(ask(1, random_prompt(9)))
    engine.cancel(0, [1])
    engine.step()
    engine.cancel(0)
    assert set(engine.progress()) == {1}
    answers = []
    while not engine.is_idle:
        answers += engine.step()
    assert [(a.task, a.token_ids.tolist()) for a in answers] == [(1, kept[0].token_ids.tolist())]
    engine.submit(ask(0, random_prompt(7), samples=2, max_tokens=2))  # asked for again, from the beginning
    assert engine.progress() == {0: 0}
    while not engine.is_idle:
        engine.step()


def test_waiting_samples_find_slots(engine) -> None:
    answers = engine.generate([ask(task, random_prompt(5), samples=4, max_tokens=4) for task in range(6)])
    assert len(answers) == 24
    assert engine.status()["live"] == engine.status()["waiting"] == 0


@pytest.mark.parametrize(
    ("version", "error", "says"),
    [
        (3, WeightsError, "1 are missing"),
        (4, WeightsError, "k_proj.weight is"),
        (5, WeightsError, "1 are unknown"),
        (99, VersionGoneError, "version 99 is not in"),
    ],
)
def test_what_is_not_this_models_is_refused_and_nothing_changes(
    engine, store: WeightStore, version: int, error: type[Exception], says: str
) -> None:
    request = ask(0, random_prompt(20), max_tokens=10)
    before = engine.generate([request])
    with pytest.raises(error, match=says):
        engine.pull(store.folder, version)
    after = engine.generate([request])
    assert after[0].logps.tobytes() == before[0].logps.tobytes()
    assert {*after[0].versions.tolist()} == {1}


def test_torn_content_is_refused(engine, store: WeightStore) -> None:
    whole = store.folder / "version_000002.safetensors"
    torn = store.folder / "version_000006.safetensors"
    data = bytearray(whole.read_bytes())
    data[-1] ^= 1
    torn.write_bytes(data)
    with pytest.raises(WeightsError, match="torn or foreign"):
        engine.pull(store.folder, 6)
    torn.unlink()


@pytest.mark.parametrize(("kind", "compiled"), [("llama", False), ("qwen3", False), ("llama_tied", True)])
def test_other_models_in_bf16(kind: str, compiled: bool, tmp_path: Path) -> None:
    """Untied heads, norms of queries and keys, and a compiled model; other weights, in bf16, through the store."""
    from cauce.engine.vllm_engine import VllmEngine

    first, second = (tiny_model(tmp_path / str(seed), kind, seed=seed, **SHAPE) for seed in (0, 1))
    store = WeightStore(tmp_path / "store", keep=1)
    tensors = load_file(second / "model.safetensors")
    store.publish({name: tensor.bfloat16() for name, tensor in tensors.items()}, version=1, lineage="a")
    engine = VllmEngine(str(first), dtype="bf16", slots=8, longest=64, compiled=compiled)
    request = ask(0, random_prompt(20), samples=8, max_tokens=20)
    for folder in (first, second):
        answers = engine.generate([request])
        model = plain_model(folder)
        away = np.concatenate([np.abs(a.logps - plain_logps(model, request, a)) for a in answers])
        assert away.mean() < TOLERANCE_BF16
        if folder == first:
            assert (
                np.concatenate([np.abs(a.logps - plain_logps(plain_model(second), request, a)) for a in answers]).mean()
                > 0.3
            )
            engine.pull(store.folder, 1)
