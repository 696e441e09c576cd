"""vLLM behind the interface of the native engine: the same requests in, the same completions out.

vLLM's engine core runs in this process and is driven by `step`, so that a worker is one process and stays a plain
class. Every sample is a request of its own, with a seed that belongs to (run seed, task, index). Log-probabilities are
those of the tokens as sampled, temperature applied. Weights come through vLLM's weight-transfer interface
(vllm_transfer.py), with its scheduler paused; its own stamps say which version drew each token.

At a change of weights every key and value is thrown away, of prompts and of answers in flight: vLLM prefills the latter
again, under the new weights, and goes on. So no token is drawn from a cache of other weights. Left out: top-p, top-k
and penalties (their log-probs are not the policy's), fixed shapes, and a model spread over several GPUs.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cauce.engine.requests import check_request
from cauce.engine.slots import aborted
from cauce.engine.vllm_transfer import NAME, Received, register
from cauce.errors import ModelError, VersionGoneError, WeightsError
from cauce.types import Completion, FinishReason, GenerationRequest, Sampling

CPU_CACHE_BYTES = 2**30  # for keys and values on a CPU, if that holds one sample; what finds no room waits
PREFILL_TOKENS = 2048  # of prompts in one step on a CPU, or one that is longer
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in this process
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
WORD_MASK = (1 << 64) - 1


@dataclass(slots=True, kw_only=True, eq=False)
class OpenSample:
    """A sample in flight."""

    request: GenerationRequest
    index: int
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


class VllmEngine:
    """Generates for many requests at once with one model; not thread-safe, one owner steps it."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        slots: int,
        longest: int | None = None,
        compiled: bool = True,
        gpu_share: float = 1.0,
    ) -> None:
        """Loads the model.

        Args:
            model_path: a folder with config.json and safetensors.
            dtype: "auto", "bf16" or "fp32", as in a recipe.
            slots: samples that run at the same time.
            longest: tokens of the longest sample with its prompt; None: the model's context.
            compiled: vLLM compiles the model (a minute at first), else it runs eagerly.
            gpu_share: of a GPU's memory, where vLLM runs on one.
        """
        if slots < 1:
            raise ModelError(f"engine.slots {slots}: at least 1 sample must fit")
        self.version = 0
        self.lineage = ""
        self._slots = slots
        self._open: dict[str, OpenSample] = {}
        self._finished: dict[int, int] = {}  # tokens of ended samples, of tasks with others in flight
        self._aborted: list[Completion] = []
        self._num_requests = self._num_sampled = self._num_steps = 0
        self._seconds = 0.0
        self._is_torn = False
        self._llm = _start(
            model_path, dtype=dtype, slots=slots, longest=longest, compiled=compiled, gpu_share=gpu_share
        )
        self._context = int(self._llm.model_config.max_model_len)
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        self._stop_ids = _eos_ids(model_path)
        self._llm.set_weight_version("0")
        self._warm_up()

    @property
    def is_idle(self) -> bool:
        """Nothing waits, nothing runs and nothing is left to be given out."""
        return not self._open and not self._aborted

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. A prompt that fills the context yields aborted answers without tokens."""
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        running = {(sample.request.task, sample.index) for sample in self._open.values()}
        check_request(request, running=running, vocabulary=self._vocabulary)
        room = self._context - len(request.prompt_ids)
        if room < 1:
            self._aborted += [aborted(request, index) for index in request.indices]
            return
        sampling = request.sampling
        prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
        for index in request.indices:
            self._num_requests += 1
            name = f"{request.task}.{index}.{self._num_requests}"
            params = SamplingParams(
                max_tokens=min(sampling.max_tokens, room),
                temperature=sampling.temperature,
                seed=sample_seed(sampling.seed, request.task, index),
                stop_token_ids=sorted({*sampling.stop_token_ids, *self._stop_ids}),
                ignore_eos=True,  # it is among the stop tokens already
                logprobs=0,  # the sampled token's own
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._llm.add_request(name, prompt, params)
            self._open[name] = OpenSample(request=request, index=index)

    def step(self) -> list[Completion]:
        """One token for every running sample; returns the answers that ended."""
        started = time.perf_counter()
        if self._is_torn:
            raise WeightsError("vLLM's model is worthless since an update of its weights failed; start another engine")
        done, self._aborted = self._aborted, []
        if self._open:
            for output in self._llm.step():
                sample = self._open.get(output.request_id)
                if sample is not None and (completion := self._record(sample, output.outputs[0])) is not None:
                    del self._open[output.request_id]
                    done.append(completion)
            tasks = {sample.request.task for sample in self._open.values()}
            self._finished = {task: tokens for task, tokens in self._finished.items() if task in tasks}
        self._num_steps += 1
        self._seconds += time.perf_counter() - started
        return done

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """Run until idle and return all answers, in the order of requests and indices."""
        asked = list(requests)
        for request in asked:
            self.submit(request)
        done = {}
        while not self.is_idle:
            done.update({(c.task, c.index): c for c in self.step()})
        return [done[request.task, index] for request in asked for index in request.indices]

    def cancel(self, task: int, indices: Sequence[int] | None = None) -> None:
        """Forget a task, or some of its samples; they produce no completion."""

        def is_meant(of_task: int, index: int) -> bool:
            return of_task == task and (indices is None or index in indices)

        names = [name for name, sample in self._open.items() if is_meant(sample.request.task, sample.index)]
        self._llm.abort_request(names)
        for name in names:
            del self._open[name]
        self._aborted = [c for c in self._aborted if not is_meant(c.task, c.index)]
        if all(sample.request.task != task for sample in self._open.values()):
            self._finished.pop(task, None)

    def progress(self) -> dict[int, int]:
        """Tokens made so far for each task in flight, its finished answers included."""
        tokens: dict[int, int] = {}
        for sample in self._open.values():
            task = sample.request.task
            tokens[task] = tokens.get(task, self._finished.get(task, 0)) + len(sample.tokens)
        return tokens

    def pull(self, folder: Path, version: int) -> Received:
        """Take a version from a weight store, between steps; samples in flight go on with it.

        Raises:
            VersionGoneError: where it is there no longer; nothing has changed.
            WeightsError: for content that is not this model's.
        """
        core = self._llm.engine_core.engine_core
        transfer = self._llm.model_executor.driver_worker.worker.weight_transfer_engine
        core.pause_scheduler(mode="keep", clear_cache=True)
        try:
            self._llm.collective_rpc("start_weight_update")
            self._llm.collective_rpc("update_weights", args=({"folder": str(folder), "version": version},))
            self._llm.collective_rpc("finish_weight_update")
        except VersionGoneError:
            raise
        except BaseException:
            self._is_torn = transfer.has_begun
            raise
        finally:
            core.resume_scheduler()
        self._llm.set_weight_version(str(version))
        received: Received = transfer.received
        self.version, self.lineage = received.version, received.lineage
        return received

    def status(self) -> dict[str, Any]:
        """Facts for a person or a metric."""
        running, waiting = self._llm.engine_core.engine_core.scheduler.get_request_counts()
        return {
            "version": self.version,
            "lineage": self.lineage,
            "deterministic": False,
            "slots": self._slots,
            "live": running,
            "waiting": waiting,
            "steps": self._num_steps,
            "sampled_tokens": self._num_sampled,
            "forward": "vllm",
            "seconds": {"prefill": 0.0, "decode": self._seconds, "sample": 0.0, "other": 0.0},  # vLLM tells no parts
        }

    def _warm_up(self) -> None:
        """Two tokens, sampled and greedy: vLLM compiles its sampler at the first, longer than a slice of work lasts."""
        for task, temperature in enumerate((0.0, 1.0)):
            sampling = Sampling(max_tokens=2, temperature=temperature, stop_token_ids=(), seed=0)
            prompt = np.zeros(min(8, self._context - 2), dtype=np.int32)
            self.generate([GenerationRequest(task=task, attempt=0, indices=(0,), prompt_ids=prompt, sampling=sampling)])
        self._num_requests = self._num_sampled = self._num_steps = 0
        self._seconds = 0.0

    def _record(self, sample: OpenSample, output: Any) -> Completion | None:
        """Takes on what one step has made for a sample; its completion where that was the last."""
        tokens = list(output.token_ids)
        logps = [table[token].logprob for token, table in zip(tokens, output.logprobs or (), strict=True)]
        if not np.isfinite(logps).all():
            raise ModelError("the model's logits are not finite: its weights hold NaN or infinite numbers")
        sample.tokens += tokens
        sample.logps += logps
        self._num_sampled += len(tokens)
        if output.finish_reason is None:
            return None
        task, count = sample.request.task, len(sample.tokens)
        self._finished[task] = self._finished.get(task, 0) + count
        versions = np.full(count, -1, dtype=np.int32)
        for span in output.weight_versions:
            versions[span.start : span.end] = int(span.version)
        reason: FinishReason = "stop" if output.finish_reason == "stop" else "length"
        return Completion(
            task=task,
            index=sample.index,
            attempt=sample.request.attempt,
            token_ids=np.array(sample.tokens, dtype=np.int32),
            logps=np.array(sample.logps, dtype=np.float32),
            versions=versions,
            mask=np.ones(count, dtype=np.uint8),
            finish_reason=reason,
        )


def sample_seed(seed: int, task: int, index: int) -> int:
    """Of one sample's random numbers, below 2^63: a function of (run seed, task, index) and of nothing else."""
    words = np.random.SeedSequence([seed & WORD_MASK, task & WORD_MASK, index]).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def cache_bytes(config: Any, *, itemsize: int, slots: int, longest: int) -> int:
    """For keys and values on a CPU: what all slots may need, within CPU_CACHE_BYTES, and one sample at least."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_sample = (longest + 256) * config.num_hidden_layers * 2 * heads * width * itemsize  # pages round it up
    return max(per_sample, min(slots * per_sample, CPU_CACHE_BYTES))


def _start(model_path: str, *, dtype: str, slots: int, longest: int | None, compiled: bool, gpu_share: float) -> Any:
    """vLLM's engine over one worker in this process."""
    os.environ.update(SETTINGS)
    from transformers import AutoConfig
    from vllm import EngineArgs, LLMEngine
    from vllm.config import WeightTransferConfig  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    from cauce.models.load import resolve_dtype

    register()
    number = resolve_dtype(dtype)
    config = AutoConfig.from_pretrained(model_path)
    context = longest or int(config.max_position_embeddings)
    room: dict[str, Any] = {"gpu_memory_utilization": 0.9 * min(1.0, gpu_share)}
    if current_platform.is_cpu():
        room = {
            "kv_cache_memory_bytes": cache_bytes(config, itemsize=number.itemsize, slots=slots, longest=context),
            # A prompt in parts would turn back the sample's random numbers, which a CPU's generator cannot.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(context, PREFILL_TOKENS),
        }
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=model_path,
            skip_tokenizer_init=True,
            dtype=str(number).removeprefix("torch."),
            max_model_len=context,
            max_num_seqs=slots,
            enforce_eager=not compiled,
            enable_prefix_caching=True,
            async_scheduling=False,  # a step's tokens are of the weights of that step
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # no defaults of the model's own
            distributed_executor_backend="uni",
            weight_transfer_config=WeightTransferConfig(backend=NAME),
            disable_log_stats=True,
            **room,
        )
    )


def _eos_ids(model_path: str) -> tuple[int, ...]:
    from transformers import AutoTokenizer, GenerationConfig

    from cauce.models.load import eos_token_ids

    try:
        configured = GenerationConfig.from_pretrained(model_path)
    except OSError:  # a model without such a file
        configured = None
    return eos_token_ids(configured, AutoTokenizer.from_pretrained(model_path))
