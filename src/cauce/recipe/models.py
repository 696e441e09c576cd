"""The recipe: one frozen pydantic model per section of the TOML file, and `Recipe` that holds them all.

Ranges of single settings are stated here; whatever concerns two settings, or needs a longer answer, is in
checks.py. Reading files and overrides is in load.py. Sizes count prompts ("tasks") and completions apart: a
plan trains on `learner.tasks_per_plan` prompts with `rollout.group_size` completions each.
"""

from typing import Any, Literal

from pydantic import Field

from cauce.recipe.fields import (
    BytesOrAuto,
    CoresOrAuto,
    CountOrAuto,
    Section,
    Strings,
    runtime,
    semantic,
)
from cauce.recipe.traits import Aggregation, KlEstimator, KlPlace

Dtype = Literal["auto", "fp32", "bf16"]

OF_THE_ALGORITHM = "the algorithm's own"


class RunSettings(Section):
    """The run as a whole."""

    dir: str = runtime("runs", "Folder under which the run's folder is made", min_length=1)
    name: str = runtime("", "Name of the run's folder; empty: the recipe's name and the time")
    seed: int = semantic(0, "Seed of data order, sampling and learner", ge=0)
    plans: int = runtime(40, "Training steps of the run; one plan trains on tasks_per_plan prompts", ge=1)


class ModelSettings(Section):
    """The model that is trained."""

    path: str = semantic("", "Folder, name fetched by `cauce model pull`, or hub id; must be given")


class DataSettings(Section):
    """Prompts for training and for evaluation, and how their columns are read."""

    train: str = semantic("", "Training rows: path or glob (.jsonl .json .parquet .csv), or builtin:addition/train")
    test: str = semantic("", "Held-out rows for evaluation, as in train; empty: no evaluation")
    format: str = semantic("auto", "Shape of the rows; auto: detected and said by `cauce check`", min_length=1)
    prompt_key: str = semantic("", "Column with the prompt; empty: the shape's own")
    gold_key: str = semantic("", "Column with the gold answer; empty: the shape's own")
    system: str = semantic("", "System message put before every prompt; empty: none")
    columns: dict[str, str] = semantic({}, "Other column names: ours = theirs")
    chat_template: bool = semantic(True, "Wrap a text prompt as a user turn where the model has a chat template")
    shuffle: bool = semantic(True, "Shuffle the rows, anew in every pass, from run.seed")
    max_prompt_tokens: int = semantic(1024, "Longer prompts are dropped and counted", ge=1)


class RewardSettings(Section):
    """What scores an answer."""

    fn: str | list[str] = semantic("", "Reward function or list of them: file.py:name or package.module:name")
    weights: list[float] = semantic([], "One weight per reward function; empty: 1 each")
    kwargs: dict[str, Any] = semantic({}, "Extra keyword arguments of every reward function")
    timeout_s: float = runtime(30.0, "Seconds after which a reward call counts as timed out", gt=0)
    max_failure_rate: float = runtime(0.5, "Share of failed rewards in a plan above which the run stops", ge=0, le=1)
    workers: int = runtime(1, "Processes that score answers", ge=1)

    @property
    def names(self) -> list[str]:
        """The reward functions as a list, whichever way they were written."""
        return ([self.fn] if self.fn else []) if isinstance(self.fn, str) else list(self.fn)


class AlgorithmSettings(Section):
    """The algorithm, and what of it is changed."""

    name: str = semantic("grpo", "Row of the table of algorithms: grpo, dr_grpo, dapo or rloo", min_length=1)
    advantage_scale: Literal["group_std", "none"] | None = semantic(
        None, "Divide centred rewards by the group's standard deviation, or not", none=OF_THE_ALGORITHM
    )
    clip_low: float | None = semantic(None, "The ratio is clipped below 1 - clip_low", none=OF_THE_ALGORITHM, gt=0)
    clip_high: float | None = semantic(None, "The ratio is clipped above 1 + clip_high", none=OF_THE_ALGORITHM, gt=0)
    dual_clip: float | None = semantic(
        None, "Bound on the ratio for negative advantages; above 1", none="no bound", gt=1
    )
    aggregation: Aggregation | None = semantic(None, "How token losses become one number", none=OF_THE_ALGORITHM)
    aggregation_length: int | None = semantic(
        None, "Constant length that token_sum_constant divides by", none="rollout.max_tokens", ge=1
    )
    kl_coef: float = semantic(0.0, "Weight of the KL divergence from the frozen first weights; 0: none", ge=0)
    kl_estimator: KlEstimator = semantic("k3", "Estimator of the KL divergence per token")
    kl_in: KlPlace = semantic("loss", "Where the KL term enters")
    correction: Literal["auto", "on", "off"] = semantic(
        "auto",
        "Truncated importance correction for a sampler of other weights or dtype; auto: where they differ",
    )
    correction_cap: float = semantic(2.0, "Largest weight of the importance correction", ge=1)
    dynamic_sampling: bool = semantic(False, "Drop groups whose rewards are all equal and sample others instead")
    mask_truncated: bool = semantic(False, "Leave answers cut off at max_tokens out of the loss")


class RolloutSettings(Section):
    """How answers are sampled for training, and what each rollout actor may use."""

    actors: int = runtime(1, "Rollout actors", ge=1)
    group_size: int = semantic(8, "Completions per prompt", ge=1)
    max_tokens: int = semantic(256, "Most new tokens of one completion", ge=1)
    temperature: float = semantic(1.0, "Sampling temperature; training needs it above 0", ge=0)
    top_p: float = semantic(1.0, "Nucleus sampling; training needs it off (1)", gt=0, le=1)
    top_k: int = semantic(0, "Top-k sampling; training needs it off (0 or -1)", ge=-1)
    stop: Strings = semantic([], "Further stop strings, each one token of the model")
    cpus: CoresOrAuto = runtime("auto", "CPUs of one actor")
    gpus: float = runtime(0.0, "GPUs of one actor; fractions share a GPU", ge=0)
    memory: BytesOrAuto = runtime("auto", "Memory of one actor: bytes, or text such as 2GB")
    object_store_memory: BytesOrAuto = runtime("auto", "Object store of a Ray we start: bytes, or text such as 2GB")


class EngineSettings(Section):
    """The engine inside each rollout actor."""

    backend: str = semantic("native", "What generates tokens: native, or vllm (docs/vllm.md)", min_length=1)
    dtype: Dtype = semantic("auto", "Precision of sampling; auto: bf16 where the hardware has it, else fp32")
    slots: int = semantic(64, "Completions generated at the same time by one engine", ge=1)
    deterministic: bool = semantic(False, "Fixed shapes, so that a sample does not depend on its batch mates; slower")
    threads: CountOrAuto = runtime("auto", "CPU threads of one engine")
    compiled: bool = runtime(
        True, "Kernels compiled for this CPU, where there is a C++ compiler; else torch alone. vllm: compiled or eager"
    )
    python: str = runtime("", "Python of vLLM's environment; empty: $CAUCE_VLLM_PYTHON, else what `make vllm` made")


class LearnerSettings(Section):
    """The learner: batch sizes, optimizer and what it may use."""

    tasks_per_plan: int = semantic(8, "Prompts per plan", ge=1)
    mini_batches: int = semantic(1, "Optimizer steps that one pass over a plan is divided into", ge=1)
    epochs: int = semantic(1, "Passes over a plan", ge=1)
    token_budget: int = semantic(
        4096,
        "Tokens of one packed micro-batch: bounds memory, leaves the gradient alone. A group over it is split by "
        "answers, or stays whole, up to 8 times as many, with activations made again: whichever is less work",
        ge=1,
    )
    dtype: Dtype = semantic("auto", "Precision of the forward pass; the weights of record stay fp32")
    compiled: bool = semantic(True, "Kernels compiled for this CPU, where the model is Llama-like; else torch alone")
    lr: float = semantic(1e-6, "Learning rate at its highest", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = semantic(
        "constant", "Course of the learning rate over all optimizer steps; linear and cosine end at 0"
    )
    warmup_steps: int = semantic(0, "Optimizer steps over which the learning rate rises from 0", ge=0)
    weight_decay: float = semantic(0.0, "AdamW's weight decay", ge=0)
    beta1: float = semantic(0.9, "AdamW's decay of the first moment", ge=0, lt=1)
    beta2: float = semantic(0.999, "AdamW's decay of the second moment", ge=0, lt=1)
    eps: float = semantic(1e-8, "AdamW's epsilon", gt=0)
    max_grad_norm: float = semantic(1.0, "Gradients are scaled down to this norm", gt=0)
    threads: CountOrAuto = semantic("auto", "CPU threads; fixed for a run, since sums depend on them")
    cpus: CoresOrAuto = runtime("auto", "CPUs reserved for the learner")
    gpus: float = runtime(0.0, "GPUs of the learner", ge=0)
    memory: BytesOrAuto = runtime("auto", "Memory reserved for the learner: bytes, or text such as 4GB")


class BufferSettings(Section):
    """Which accepted groups a plan may use."""

    max_staleness: int = semantic(0, "Versions a group may lag behind when it is planned; 0: synchronous", ge=0)
    max_reuse: int = semantic(1, "Plans that may use the same group", ge=1)
    sampling: Literal["in_order", "random"] = semantic("in_order", "How a plan picks among the buffered groups")


class WeightsSettings(Section):
    """When new weights reach the rollout actors."""

    every: int = semantic(1, "Plans between two publications of the weights", ge=1)


class EvalSettings(Section):
    """Evaluation on data.test: greedy, one completion per task."""

    every: int = runtime(10, "Plans between two evaluations; 0: only before and after", ge=0)
    tasks: int = semantic(200, "Tasks of data.test that are used, from the first on", ge=1)
    max_tokens: int | None = runtime(
        None, "Most new tokens of one answer in evaluation", none="rollout.max_tokens", ge=1
    )
    at_start: bool = runtime(True, "Evaluate once before training")


class CheckpointSettings(Section):
    """When the run is saved."""

    max_redo_s: float = runtime(60.0, "Save when redoing the plans since the last checkpoint would take longer", gt=0)
    every: int = runtime(0, "Plans between two checkpoints; 0: decided by max_redo_s", ge=0)
    keep: int = runtime(2, "Newest checkpoints that are kept", ge=1)


class JournalSettings(Section):
    """What the journal keeps."""

    keep: str = semantic("all", "Which samples stay on disk", min_length=1)
    locking: Literal["auto", "shared", "exclusive"] = runtime(
        "auto",
        "exclusive: for a run folder on a network filesystem, nobody else reads it meanwhile; auto: by its mount",
    )


class ClusterSettings(Section):
    """The Ray cluster."""

    address: str = runtime("local", "local: a Ray of our own; auto or host:port: one that runs already", min_length=1)
    cpus: CountOrAuto = runtime("auto", "CPUs of a Ray we start; auto: those this process may use")
    dashboard: bool = runtime(True, "Start the dashboard of a Ray we start")
    namespace: str = runtime("cauce", "Ray namespace of the run's actors", min_length=1)


class LoggingSettings(Section):
    """What is shown and written beside metrics.jsonl."""

    tensorboard: bool = runtime(True, "Write TensorBoard files where the package is installed")
    trace: bool = runtime(False, "Write a timeline of all processes, RUN/trace-N.json, for ui.perfetto.dev")
    live: bool = runtime(True, "Show a live view in a terminal; otherwise one line per plan")


class Recipe(Section):
    """A whole run. Build it from a file or from Python; `cauce.recipe.checks.check_recipe` says if it makes
    sense."""

    stage: str = semantic("rl", "What is run", min_length=1)
    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    buffer: BufferSettings = Field(default_factory=BufferSettings)
    weights: WeightsSettings = Field(default_factory=WeightsSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    journal: JournalSettings = Field(default_factory=JournalSettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)


SECTIONS: dict[str, type[Section]] = {
    "run": RunSettings,
    "model": ModelSettings,
    "data": DataSettings,
    "reward": RewardSettings,
    "algorithm": AlgorithmSettings,
    "rollout": RolloutSettings,
    "engine": EngineSettings,
    "learner": LearnerSettings,
    "buffer": BufferSettings,
    "weights": WeightsSettings,
    "eval": EvalSettings,
    "checkpoint": CheckpointSettings,
    "journal": JournalSettings,
    "cluster": ClusterSettings,
    "logging": LoggingSettings,
}
