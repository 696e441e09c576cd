"""Every metric name of Cauce, with its meaning and what other trainers call the same quantity.

docs/metrics.md is generated from this list: `python -m cauce.metrics.names > docs/metrics.md`. A name with
<...> stands for a family. Where another trainer's definition differs, the meaning column is what holds.
"""

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class MetricName:
    """One row of the list; an empty `trl` or `verl` means that there is no such metric there."""

    name: str
    meaning: str
    trl: str = ""
    verl: str = ""


# The split of a plan's time that people are shown, each part with the metrics it adds up.
TIME_PARTS: dict[str, tuple[str, ...]] = {
    "generate": ("time/generate",),
    "reward": ("time/reward",),
    "learn": ("time/learn",),
    "sync": ("time/sync",),
    "record": ("time/journal", "time/checksum"),
    "checkpoint": ("time/checkpoint",),
    "eval": ("time/eval",),
    "idle": ("time/idle",),
}

METRICS: tuple[MetricName, ...] = (
    MetricName(
        "reward/mean",
        "mean of what the reward functions returned (weighted sum) over scored samples; never with a KL term",
        "reward",
        "critic/score/mean",
    ),
    MetricName("reward/std", "standard deviation of that reward over the scored samples of the plan", "reward_std"),
    MetricName(
        "reward/<fn>/mean",
        "mean of one reward function before weighting, over its scored samples",
        "rewards/<fn>/mean",
    ),
    MetricName(
        "reward/zero_variance_fraction",
        "share of groups whose samples all earned the same, so that they carry no signal",
        "frac_reward_zero_std",
    ),
    MetricName("reward/<name>", "a number of one reward function that it logged under a name of its own, mean"),
    MetricName(
        "reward/<fn>/<name>",
        "a number that the reward logged itself (TRL's log_metric, further keys of verl's result), mean",
    ),
    MetricName(
        "response/length_mean",
        "mean tokens per answer, the stop token included; truncated and masked answers count in full",
        "completions/mean_length",
        "response_length/mean",
    ),
    MetricName(
        "response/length_max",
        "tokens of the longest answer",
        "completions/max_length",
        "response_length/max",
    ),
    MetricName(
        "response/truncated_fraction",
        "share of answers that ended at the token limit instead of a stop token",
        "completions/clipped_ratio",
        "response_length/clip_ratio",
    ),
    MetricName(
        "policy/entropy",
        "mean entropy in nats of the next-token distribution over trained tokens",
        "entropy",
        "actor/entropy",
    ),
    MetricName(
        "policy/kl_reference",
        "mean per-token KL estimate to the frozen reference, over trained tokens",
        "kl",
        "actor/kl_loss",
    ),
    MetricName(
        "policy/clip_fraction_low",
        "share of trained tokens whose gradient the lower clip bound removed",
        "clip_ratio/low_mean",
        "actor/pg_clipfrac_lower",
    ),
    MetricName(
        "policy/clip_fraction_high",
        "share of trained tokens whose gradient the upper clip bound removed",
        "clip_ratio/high_mean",
        "actor/pg_clipfrac",
    ),
    MetricName(
        "sampler/log_ratio_abs_mean",
        "mean |log p of the learner - log p recorded while sampling| over trained tokens: large where the two disagree",
        "sampling/sampling_logp_difference/mean",
        "rollout_corr/*",
    ),
    MetricName("policy/ratio_mean", "mean probability ratio of the learner to the proximal policy, near 1"),
    MetricName(
        "sampler/correction_mean",
        "mean truncated importance weight of proximal policy to sampler, where the correction is on",
        "sampling/importance_sampling_ratio/mean",
        "rollout_corr/*",
    ),
    MetricName(
        "sampler/effective_sample_size",
        "of a fork: share of the plan's trained tokens that its importance weights are worth, (sum w)^2 / (n sum w^2) "
        "with w = p of the learner / p while sampling, not truncated; 1 where the two agree",
        "",
        "rollout_corr/rollout_is_eff_sample_size",
    ),
    MetricName("sampler/correction_capped_fraction", "share of trained tokens whose weight the cap cut"),
    MetricName("optim/lr", "learning rate of the plan's last optimizer step", "learning_rate", "actor/lr"),
    MetricName(
        "optim/grad_norm",
        "gradient norm before clipping, mean over the plan's optimizer steps",
        "grad_norm",
        "actor/grad_norm",
    ),
    MetricName("optim/step", "optimizer steps so far in the run", "step", "training/global_step"),
    MetricName("optim/skipped", "optimizer steps of this plan that were skipped for a non-finite loss or gradient"),
    MetricName(
        "loss/policy",
        "policy loss; near 0 is normal: group-relative advantages sum to zero, its gradient does not",
        "loss",
        "actor/pg_loss",
    ),
    MetricName("loss/total", "what was differentiated: policy loss and, where configured, the KL term", "loss"),
    MetricName("time/generate", "seconds in which the trainer waited for answers", "", "timing_s/gen"),
    MetricName("time/reward", "seconds in which the trainer waited for rewards", "", "timing_s/reward"),
    MetricName(
        "time/learn",
        "seconds in the learner: scoring, forward, backward, optimizer",
        "",
        "timing_s/update_actor",
    ),
    MetricName("time/sync", "seconds of publishing new weights", "", "timing_s/update_weights"),
    MetricName("time/idle", "seconds of the plan that no other part accounts for"),
    MetricName("time/journal", "seconds inside journal calls"),
    MetricName("time/checksum", "seconds of weight checksums"),
    MetricName(
        "time/checkpoint",
        "seconds of the checkpoint between the plan before and this one, beside time/total",
        "",
        "timing_s/save_checkpoint",
    ),
    MetricName(
        "time/eval",
        "seconds of the evaluation between the plan before and this one, beside time/total; in plan 1 that of the "
        "untrained model",
        "",
        "timing_s/testing",
    ),
    MetricName(
        "time/total",
        "seconds from the plan's start to its end, with the publication before it",
        "step_time",
        "timing_s/step",
    ),
    MetricName(
        "eval/<set>/accuracy",
        "mean reward of greedy answers to the held-out set",
        "eval_reward",
        "val-core/<source>/...",
    ),
    MetricName(
        "tokens_per_s", "tokens sampled for the plan, divided by time/total; not where none were", "", "perf/throughput"
    ),
    MetricName("staleness/max", "learner version minus the oldest version among the plan's groups, when planned"),
    MetricName("learner/tokens", "tokens that entered the loss of this plan"),
    MetricName("learner/skipped_groups", "groups without signal whose forward pass was skipped (tokens still count)"),
    MetricName("learner/packed_tokens", "tokens that the forward pass computed, a group's prompt once"),
    MetricName(
        "learner/peak_memory_mb",
        "most memory that the learner's process held during an optimizer step of the plan (CPU: resident; GPU: "
        "allocated by torch), weights and optimizer included; grows with learner.token_budget, not with the tokens "
        "of a step",
        "",
        "perf/max_memory_allocated_gb",
    ),
    MetricName("rollout/busy_fraction", "share of time/total that rollout actors spent generating, mean over actors"),
    MetricName("rollout/live_slots", "tokens per step of an engine: the answers that it works on at the same time"),
    MetricName("rollout/unscored", "answers since the last plan whose reward raised, timed out or abstained"),
    MetricName("rollout/dropped_<reason>", "tasks dropped since the last plan, by reason"),
    MetricName("memory_mb", "memory of all processes of the run"),
)


def is_known(name: str) -> bool:
    """Whether the name is on the list, or belongs to one of its families."""
    return any(pattern.fullmatch(name) for pattern in _patterns())


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    def to_pattern(name: str) -> re.Pattern[str]:
        return re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">")))

    return tuple(to_pattern(metric.name) for metric in METRICS)


def markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m cauce.metrics.names > docs/metrics.md` from `src/cauce/metrics/names.py`.",
        "",
        "One row per plan in `RUN/metrics.jsonl`, with `plan` as the x axis and `time` (unix seconds)",
        "beside it; the same names in TensorBoard. Every mean is over what it counts (tokens, samples,",
        "groups) across the whole plan, never a mean of means. A non-finite number is written as `null`.",
        "",
        "A loss near 0 is normal: group-relative advantages sum to zero. Watch `reward/mean` and",
        "`eval/<set>/accuracy` instead; `optim/grad_norm` is above 0 whenever something is learned.",
        "",
        "| name | meaning | TRL | verl |",
        "|---|---|---|---|",
    ]
    for metric in METRICS:
        trl, verl = (f"`{name}`" if name else "-" for name in (metric.trl, metric.verl))
        lines.append(f"| `{metric.name}` | {metric.meaning.replace('|', chr(92) + '|')} | {trl} | {verl} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
