"""Rendering: the template's tokens exactly, one BOS, nothing cut; answers without stop token; stop tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from cauce.environments.single_turn import SingleTurn, survey_prompts
from cauce.errors import DataError, ModelError, RecipeError
from cauce.recipe.models import DataSettings
from cauce.types import Row
from tests.tiny import CHAT_TEMPLATE, EOS_ID, byte_tokenizer

START = "<|im_start|>"
BOS_ID = 259  # <|endoftext|> serves as BOS below


def row(prompt: Any) -> Row:
    """A row with nothing but a prompt."""
    return Row(id="train:0", prompt=prompt, columns={})


def environment(tokenizer: PreTrainedTokenizerFast | None = None, **settings: Any) -> SingleTurn:
    """The environment of the byte tokenizer, or of a given one."""
    return SingleTurn(tokenizer or byte_tokenizer(), DataSettings(**settings))


def bos_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a BOS before and an EOS after every text of its own accord, as Llama's does."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        special_tokens=[("<|endoftext|>", BOS_ID), ("<|im_end|>", EOS_ID)],
    )
    tokenizer.chat_template = template
    return tokenizer


def test_text_becomes_a_user_turn_and_conversations_stay() -> None:
    expected = f"{START}user\n2 + 2?<|im_end|>\n{START}assistant\n"
    tokenizer = byte_tokenizer()
    for prompt in ("2 + 2?", [{"role": "user", "content": "2 + 2?"}]):
        rendered = environment(tokenizer).render(row(prompt))
        assert rendered.text == expected
        assert rendered.token_ids.dtype == "int32"
        assert tokenizer.decode(rendered.token_ids) == expected


def test_markers_are_single_tokens_and_not_their_letters() -> None:
    ids = environment().render(row("hi")).token_ids.tolist()
    assert ids.count(257) == 2
    assert ids.count(EOS_ID) == 1


def test_system_text_goes_first_and_gives_way_to_the_rows_own() -> None:
    with_system = environment(system="Be brief.")
    assert with_system.render(row("hi")).text.startswith(f"{START}system\nBe brief.<|im_end|>\n{START}user\nhi")
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "hi"}]
    assert "brief" not in with_system.render(row(own)).text


def test_an_answer_already_begun_is_gone_on_with() -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
    assert environment().render(row(begun)).text.endswith(f"{START}assistant\n<think>")


def test_chat_template_off_leaves_text_as_it_is() -> None:
    rendered = environment(chat_template=False).render(row("2 + 2 ="))
    assert rendered.text == "2 + 2 ="
    assert len(rendered.token_ids) == 7


def test_without_a_template_text_works_and_a_conversation_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert environment(tokenizer).render(row("hi")).text == "hi"
    with pytest.raises(DataError, match="no chat template"):
        environment(tokenizer).render(row([{"role": "user", "content": "hi"}]))
    with pytest.raises(RecipeError, match=r"data\.system = 'Be brief\.' needs a chat template"):
        environment(tokenizer, system="Be brief.")


@pytest.mark.parametrize("make_row", [lambda: row("hi"), lambda: row("<|endoftext|>hi")])
def test_exactly_one_bos_in_plain_text(make_row: Callable[[], Row]) -> None:
    """C15."""
    ids = environment(bos_tokenizer(None)).render(make_row()).token_ids.tolist()
    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1
    assert ids[-1] != EOS_ID
    assert len(ids) == 3


def test_exactly_one_bos_where_template_and_tokenizer_both_add_one() -> None:
    """C15."""
    tokenizer = bos_tokenizer("{{ bos_token }}" + CHAT_TEMPLATE)
    ids = environment(tokenizer).render(row("hi")).token_ids.tolist()
    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1
    assert ids.count(EOS_ID) == 1  # of the user's turn; none is appended
    # The same tokens as by the tokenizer's own way of rendering and encoding in one.
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert ids == list(whole["input_ids"])


class DictTokenizer(PreTrainedTokenizerFast):
    """A tokenizer whose template call answers with a dict, as one upgrade of a library made it."""

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return {"input_ids": [1, 2]}


def test_a_template_call_that_returns_a_dict_raises() -> None:
    tokenizer = DictTokenizer(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    with pytest.raises(ModelError, match="returned dict, not text"):
        environment(tokenizer).render(row("hi"))


def test_a_template_that_refuses_names_the_row() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"row train:0: .* refused it .no system role"):
        environment(tokenizer).render(row("hi"))


def test_long_prompts_are_counted_whole_and_none_fitting_is_an_error() -> None:
    """C18."""
    short = environment(chat_template=False)
    survey = survey_prompts(short, [row("abc"), row("abcdefghij"), row("abcdef")], limit=6)
    assert (survey.longest, survey.too_long) == (10, (1,))
    assert len(short.render(row("abcdefghij")).token_ids) == 10  # rendered as it is, never cut
    with pytest.raises(DataError, match=r"all 2 prompts are longer than 6 tokens; the shortest has 10 tokens"):
        survey_prompts(short, [row("abcdefghij")] * 2, limit=6)


def test_answer_text_drops_the_stop_token_and_special_tokens_only() -> None:
    tokenizer = byte_tokenizer()
    single_turn = environment(tokenizer)
    ids = tokenizer(" It is 68 . ok").input_ids
    assert single_turn.answer_text([*ids, EOS_ID], [EOS_ID]) == " It is 68 . ok"
    assert single_turn.answer_text(ids, [EOS_ID]) == " It is 68 . ok"
    newline = tokenizer("\n").input_ids[0]
    assert single_turn.answer_text([*ids, newline], [EOS_ID, newline]) == " It is 68 . ok"
    assert single_turn.answer_text([*ids, newline], [EOS_ID]) == " It is 68 . ok\n"
    assert single_turn.answer_text([], [EOS_ID]) == ""


def test_stop_tokens_are_those_of_the_model_and_single_token_texts() -> None:
    single_turn = environment()
    newline = byte_tokenizer()("\n").input_ids[0]
    assert single_turn.stop_token_ids([]) == (EOS_ID,)
    assert single_turn.stop_token_ids(["\n", "<|endoftext|>", "\n"]) == (EOS_ID, newline, 259)
    assert single_turn.stop_token_ids([], eos_token_ids=(259, EOS_ID)) == (259, EOS_ID)
    with pytest.raises(RecipeError, match=r"rollout\.stop has '\\n\\n', which is 2 tokens"):
        single_turn.stop_token_ids(["\n\n"])
    with pytest.raises(RecipeError, match="which is 0 tokens"):
        single_turn.stop_token_ids([""])
