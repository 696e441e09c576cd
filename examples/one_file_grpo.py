"""GRPO in one file, one process, without Ray: the loop that the rest of Cauce makes durable, fast and distributed.

Read it from top to bottom. A step samples a group of answers to each prompt, scores them, compares each answer with the
others of its group, and moves the weights so that better answers become more likely (arXiv 2402.03300). What is left
out on purpose, and where Cauce keeps it: continuous batching and prompts computed once per group (engine/), packing
(packing.py), a record that survives kill -9 (journal/), several processes (runtime/), clipping against stale samples
and other algorithms (algorithms/).

    python examples/one_file_grpo.py --steps 20            # the model of the quickstart; about 15 s a step on two cores
    python examples/one_file_grpo.py --model FOLDER --steps 2 --prompts 2 --group 4
"""

import argparse
import random
import re
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cauce.models.load import local_folder

SYSTEM = "You are a calculator. Reply with the number only."


@dataclass(frozen=True)
class Settings:
    """Everything that can be turned."""

    steps: int
    prompts: int  # per step
    group: int  # answers per prompt
    max_tokens: int
    temperature: float
    lr: float
    seed: int


@dataclass(frozen=True)
class Rollout:
    """The answers of one step, right-padded. Letters: B answers, L tokens of prompt and answer."""

    ids_BL: Tensor
    attention_BL: Tensor  # 1 where there is a token
    trained_BL: Tensor  # 1 where the policy sampled the token
    rewards_B: Tensor
    group_B: Tensor  # which prompt an answer belongs to


def main() -> None:
    settings, path = read_arguments()
    torch.manual_seed(settings.seed)
    numbers = random.Random(settings.seed)
    folder = local_folder(path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # dropout off: a token has one log-probability
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    for step in range(1, settings.steps + 1):
        started = time.perf_counter()
        pairs = [(numbers.randint(10, 99), numbers.randint(10, 99)) for _ in range(settings.prompts)]
        rollout = sample(model, tokenizer, pairs, settings)
        loss, norm = update(model, optimizer, rollout, settings.temperature)
        print(
            f"step {step:3d}  reward {rollout.rewards_B.mean():.3f}  loss {loss:+.4f}  gradient {norm:.2f}  "
            f"{time.perf_counter() - started:.1f} s",
            flush=True,
        )
    question = (23, 45)
    answer = sample(model, tokenizer, [question], replace_group(settings, 1))
    text = tokenizer.decode(answer.ids_BL[0][answer.trained_BL[0].bool()], skip_special_tokens=True)
    print(f"{question[0]} + {question[1]} = ?  {text!r}")


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tuple[int, int]],
    settings: Settings,
) -> Rollout:
    """`group` answers to each prompt, with their rewards."""
    rows, rewards, groups = [], [], []
    stop = tokenizer.eos_token_id
    for number, (a, b) in enumerate(pairs):
        prompt = render(tokenizer, f"{a} + {b} =")
        with torch.no_grad():
            out = model.generate(
                prompt.repeat(settings.group, 1),
                attention_mask=torch.ones(settings.group, prompt.shape[1], dtype=torch.long),
                max_new_tokens=settings.max_tokens,
                do_sample=True,
                temperature=settings.temperature,
                top_k=0,  # nothing cut off: the log-probabilities below are those that were sampled from
                top_p=1.0,
                eos_token_id=stop,
                pad_token_id=stop,
            )
        for ids in out[:, prompt.shape[1] :]:
            answer = up_to_stop(ids, stop)
            rows.append((prompt[0], answer))
            rewards.append(reward(tokenizer.decode(answer, skip_special_tokens=True), a + b))
            groups.append(number)
    return pad(rows, rewards, groups)


def reward(text: str, gold: int) -> float:
    """1 where the last number of the answer is right, else 0."""
    found = re.findall(r"\d+", text)
    return float(bool(found) and int(found[-1]) == gold)


def advantages(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """A_i = (r_i - mean) / std over the answers to the same prompt; 0 where all are equal, so nothing is learned."""
    out_B = torch.zeros_like(rewards_B)
    for group in group_B.unique():
        members = group_B == group
        centred = rewards_B[members] - rewards_B[members].mean()
        if centred.abs().max() > 0:
            out_B[members] = centred / rewards_B[members].std()
    return out_B


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollout: Rollout, temperature: float
) -> tuple[float, float]:
    """One optimizer step; returns the loss and the norm of the gradient.

    All trained tokens weigh the same (aggregation "token_mean"); the GRPO paper averages within each answer first.
    The samples come from these very weights, so the ratio of new to old probability is 1 and only its gradient
    matters: loss = -sum_t A_t exp(logp_t - logp_t.detach()) / number of trained tokens. That is why a loss near 0 is
    normal here: the advantages of a group sum to zero.
    """
    advantage_B = advantages(rollout.rewards_B, rollout.group_B)
    num_tokens = rollout.trained_BL.sum()
    optimizer.zero_grad()
    total = 0.0
    for group in rollout.group_B.unique():  # one group at a time keeps memory small; the divisor stays global
        rows = rollout.group_B == group
        if not advantage_B[rows].any():
            continue
        logp_BT, trained_BT = token_logps(model, rollout, rows, temperature)
        ratio_BT = torch.exp(logp_BT - logp_BT.detach())
        loss_BT = -advantage_B[rows, None] * ratio_BT
        loss = torch.where(trained_BT, loss_BT, 0.0).sum() / num_tokens
        loss.backward()
        total += float(loss.detach())
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    if norm == norm and norm != float("inf"):  # a step on NaN would poison the weights for good
        optimizer.step()
    return total, norm


def token_logps(model: PreTrainedModel, rollout: Rollout, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of every token given those before it, and which of them are trained. [B, L-1] each."""
    ids_BL = rollout.ids_BL[rows]
    logits_BLV = model(input_ids=ids_BL, attention_mask=rollout.attention_BL[rows]).logits
    # Position t predicts token t + 1, at the temperature it was sampled with.
    log_softmax_BTV = F.log_softmax(logits_BLV[:, :-1].float() / temperature, dim=-1)
    logp_BT = log_softmax_BTV.gather(-1, ids_BL[:, 1:, None]).squeeze(-1)
    return logp_BT, rollout.trained_BL[rows][:, 1:].bool()


def render(tokenizer: PreTrainedTokenizerBase, question: str) -> Tensor:
    """The question as the model's chat format, ending where the answer begins. [1, P]"""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


def up_to_stop(ids_T: Tensor, stop: int) -> Tensor:
    """The sampled tokens, the stop token included; it was sampled, so it is trained like any other."""
    ends = (ids_T == stop).nonzero()
    return ids_T if len(ends) == 0 else ids_T[: int(ends[0]) + 1]


def pad(rows: list[tuple[Tensor, Tensor]], rewards: list[float], groups: list[int]) -> Rollout:
    """Right-padded tensors; padding is neither attended to nor trained on."""
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids_BL = torch.zeros(len(rows), length, dtype=torch.long)
    attention_BL, trained_BL = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL)
    for b, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids_BL[b, :end] = torch.cat([prompt, answer])
        attention_BL[b, :end] = 1
        trained_BL[b, len(prompt) : end] = 1
    return Rollout(
        ids_BL=ids_BL,
        attention_BL=attention_BL,
        trained_BL=trained_BL,
        rewards_B=torch.tensor(rewards),
        group_B=torch.tensor(groups),
    )


def replace_group(settings: Settings, group: int) -> Settings:
    return Settings(**{**vars(settings), "group": group})


def read_arguments() -> tuple[Settings, str]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a folder, or a name `cauce model pull` knows")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    path = arguments.pop("model")
    return Settings(**arguments), path


if __name__ == "__main__":
    main()
