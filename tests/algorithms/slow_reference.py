"""The algorithms once more, as float64 Python loops written from the papers; nothing of cauce is used here.

Gradients are written out by hand, token by token, with respect to the log-probability of that token.

    GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, RLOO 2402.14740, PPO 1707.06347,
    dual clip 1912.09729
"""

import math
from dataclasses import dataclass, field


@dataclass
class Answer:
    """One answer of a group; lists run along its tokens."""

    reward: float
    logp: list[float]
    behaviour: list[float]
    proximal: list[float] | None
    reference: list[float] | None
    mask: list[int]
    advantage: float = 0.0


@dataclass
class Rules:
    """What the papers leave as choices."""

    advantage: str
    clip_low: float
    clip_high: float
    aggregation: str
    constant_length: int
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    cap: float | None = None


@dataclass
class Objective:
    """A loss with its derivative for every token of every answer, in the order of groups and answers."""

    value: float
    gradient: list[list[float]] = field(default_factory=list)


def advantages(rewards: list[float], kind: str) -> list[float]:
    size = len(rewards)
    mean = math.fsum(rewards) / size
    result = []
    for i in range(size):
        if kind == "leave_one_out":
            others = [rewards[j] for j in range(size) if j != i]
            result.append(rewards[i] - math.fsum(others) / len(others))
        elif kind == "group_mean":
            result.append(rewards[i] - mean)
        else:
            variance = math.fsum((r - mean) ** 2 for r in rewards) / (size - 1)
            result.append((rewards[i] - mean) / math.sqrt(variance) if variance > 0 else 0.0)
    return result


def kl_estimate(logp: float, reference: float, estimator: str) -> float:
    if estimator == "k1":
        return logp - reference
    if estimator == "k2":
        return 0.5 * (logp - reference) ** 2
    return math.exp(reference) / math.exp(logp) - (reference - logp) - 1.0


def policy_token(logp: float, proximal: float, behaviour: float, advantage: float, rules: Rules) -> tuple[float, float]:
    """Loss of one token and its derivative."""
    ratio = math.exp(logp) / math.exp(proximal)
    if advantage >= 0:
        is_clipped = ratio > 1 + rules.clip_high
        objective = min(ratio, 1 + rules.clip_high) * advantage
    else:
        is_clipped = ratio < 1 - rules.clip_low
        objective = max(ratio, 1 - rules.clip_low) * advantage
        if rules.dual_clip is not None and objective < rules.dual_clip * advantage:
            is_clipped = True
            objective = rules.dual_clip * advantage
    slope = 0.0 if is_clipped else ratio * advantage
    weight = 1.0 if rules.cap is None else min(rules.cap, math.exp(proximal) / math.exp(behaviour))
    return -weight * objective, -weight * slope


def kl_token(logp: float, reference: float, behaviour: float, rules: Rules) -> tuple[float, float]:
    """KL term of one token and its derivative: (log pi - log ref) times the derivative of log pi."""
    weight = 1.0 if rules.cap is None else min(rules.cap, math.exp(logp) / math.exp(behaviour))
    value = kl_estimate(logp, reference, rules.kl_estimator)
    return rules.kl_coef * weight * value, rules.kl_coef * weight * (logp - reference)


def objective(groups: list[list[Answer]], rules: Rules, *, is_advantage_given: bool = False) -> Objective:
    """The whole step: advantages per group, loss per token, aggregation over all groups."""
    if not is_advantage_given:
        for group in groups:
            rewards = [shaped_reward(answer, rules) for answer in group]
            for answer, advantage in zip(group, advantages(rewards, rules.advantage), strict=True):
                answer.advantage = advantage
    answers = [answer for group in groups for answer in group]
    num_tokens = sum(sum(answer.mask) for answer in answers)
    num_sequences = sum(1 for answer in answers if sum(answer.mask) > 0)
    result = Objective(0.0)
    for answer in answers:
        slopes = []
        for t in range(len(answer.logp)):
            if answer.mask[t] == 0:
                slopes.append(0.0)
                continue
            value, slope = token_loss(answer, t, rules)
            divisor = token_divisor(answer, num_tokens, num_sequences, rules)
            result.value += value / divisor
            slopes.append(slope / divisor)
        result.gradient.append(slopes)
    return result


def shaped_reward(answer: Answer, rules: Rules) -> float:
    if rules.kl_coef == 0 or rules.kl_in != "reward" or answer.reference is None:
        return answer.reward
    policy = answer.behaviour if answer.proximal is None else answer.proximal
    total = 0.0
    for t in range(len(answer.logp)):
        if answer.mask[t]:
            total += kl_estimate(policy[t], answer.reference[t], rules.kl_estimator)
    return answer.reward - rules.kl_coef * total


def token_loss(answer: Answer, t: int, rules: Rules) -> tuple[float, float]:
    proximal = answer.logp[t] if answer.proximal is None else answer.proximal[t]
    value, slope = policy_token(answer.logp[t], proximal, answer.behaviour[t], answer.advantage, rules)
    if rules.kl_coef > 0 and rules.kl_in == "loss":
        assert answer.reference is not None
        kl_value, kl_slope = kl_token(answer.logp[t], answer.reference[t], answer.behaviour[t], rules)
        return value + kl_value, slope + kl_slope
    return value, slope


def token_divisor(answer: Answer, num_tokens: int, num_sequences: int, rules: Rules) -> float:
    if rules.aggregation == "token_mean":
        return num_tokens
    if rules.aggregation == "sequence_mean_token_mean":
        return sum(answer.mask) * num_sequences
    if rules.aggregation == "sequence_mean_token_sum":
        return num_sequences
    return num_sequences * rules.constant_length
