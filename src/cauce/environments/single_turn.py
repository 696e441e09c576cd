"""The environment of one question and one answer: turns a row into prompt tokens and answer tokens into text.

Text becomes a user turn where the model has a chat template (`data.chat_template = false` switches that off);
a conversation always goes through the template. Leaves out tools and further turns. Sits between data (rows)
and the engine (token ids); the text it gives back is what rewards see. Answer tokens are never encoded a
second time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cauce.errors import DataError, ModelError, RecipeError
from cauce.recipe.models import DataSettings
from cauce.types import Message, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt as the model sees it."""

    text: str
    token_ids: np.ndarray  # int32 [P]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSurvey:
    """What rendering every row found out."""

    longest: int  # tokens of the longest prompt, dropped ones included
    mean: float
    too_long: tuple[int, ...]  # indices of rows above the limit


class SingleTurn:
    """Renders prompts and reads answers for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settings: DataSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._has_template = bool(tokenizer.chat_template)
        if settings.system and not (self._has_template and settings.chat_template):
            raise RecipeError(
                f"data.system = {settings.system!r} needs a chat template, and "
                + ("data.chat_template is false" if self._has_template else "this model's tokenizer has none")
                + "; put the text into the rows instead"
            )

    def render(self, row: Row) -> RenderedPrompt:
        """The prompt's text and tokens, ending where the answer begins."""
        if isinstance(row.prompt, str) and not (self._has_template and self._settings.chat_template):
            return self._encode_plain(row.prompt)
        if not self._has_template:
            raise DataError(
                f"row {row.id}: the prompt is a conversation, and this model's tokenizer has no chat "
                "template. Give the prompts as text, or a model folder with chat_template.jinja"
            )
        text = self._apply_template(row)
        # The template has written every special token itself, BOS included; the tokenizer must not add
        # another.
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return RenderedPrompt(text=text, token_ids=np.asarray(ids, dtype=np.int32))

    def answer_text(self, token_ids: Sequence[int] | np.ndarray, eos_ids: Iterable[int]) -> str:
        """The answer as rewards see it: without the stop token it ended in and without special tokens."""
        ids = np.asarray(token_ids, dtype=np.int64)  # of a list the tokenizer would look at every item, in Python
        if len(ids) and int(ids[-1]) in set(eos_ids):
            ids = ids[:-1]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stop_token_ids(self, extra: Sequence[str], *, eos_token_ids: Iterable[int] = ()) -> tuple[int, ...]:
        """End-of-sequence ids of the model and the tokenizer, then those of `rollout.stop`, each once."""
        stops = dict.fromkeys(int(i) for i in eos_token_ids)
        if self._tokenizer.eos_token_id is not None:
            stops.setdefault(int(self._tokenizer.eos_token_id))
        for text in extra:
            stops.setdefault(self._single_token(text))
        return tuple(stops)

    def _apply_template(self, row: Row) -> str:
        messages: list[Message] = (
            [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
        )
        if self._settings.system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self._settings.system}, *messages]
        goes_on = messages[-1].get("role") == "assistant"  # an answer already begun
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
            )
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise DataError(f"row {row.id}: the model's chat template refused it ({error})") from error
        if not isinstance(text, str):
            raise ModelError(
                f"row {row.id}: the tokenizer's apply_chat_template(tokenize=False) returned "
                f"{type(text).__name__}, not text; this tokenizer class is not supported"
            )
        return text

    def _encode_plain(self, text: str) -> RenderedPrompt:
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        with_special = list(self._tokenizer(text)["input_ids"])
        bos = self._tokenizer.bos_token_id
        # Only a BOS is taken over: an EOS that the tokenizer would append has no place before an answer, and
        # a text that spells the BOS out already has it.
        if bos is not None and with_special[:1] == [bos] and ids[:1] != [bos]:
            ids = [bos, *ids]
        return RenderedPrompt(text=text, token_ids=np.asarray(ids, dtype=np.int32))

    def _single_token(self, text: str) -> int:
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        if len(ids) == 1 and self._tokenizer.decode(ids) == text:
            return int(ids[0])
        known = self._tokenizer.get_vocab().get(text)  # tokenizers that put a space before every text
        if known is not None:
            return int(known)
        raise RecipeError(
            f"rollout.stop has {text!r}, which is {len(ids)} tokens for this model; only single tokens can "
            "end an answer. Name one token (for example the end-of-turn marker), or cut the text in the "
            "reward"
        )


def survey_prompts(environment: SingleTurn, rows: Iterable[Row], *, limit: int) -> PromptSurvey:
    """Render every row; an error if none fits into `limit` tokens: such a run would train on nothing."""
    lengths: list[int] = []
    too_long: list[int] = []
    for index, row in enumerate(rows):
        prompt = environment.render(row)
        lengths.append(len(prompt.token_ids))
        if len(prompt.token_ids) > limit:
            too_long.append(index)
    if lengths and len(too_long) == len(lengths):
        raise DataError(
            f"all {len(lengths)} prompts are longer than {limit} tokens; the shortest has "
            f"{min(lengths)} tokens. Raise data.max_prompt_tokens or shorten the rows"
        )
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    return PromptSurvey(longest=max(lengths, default=0), mean=mean, too_long=tuple(too_long))
