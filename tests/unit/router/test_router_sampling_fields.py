"""What bodies say of the choice of tokens and of the text: it reaches the request as it is."""

from __future__ import annotations

from pagewire.shared.text.answer_text import TextRules
from pagewire.tests.support.request_bodies import (
    CONTEXT,
    MODEL,
    chat,
    completion,
    refusal,
)


def test_what_shapes_the_choice_of_tokens_reaches_the_spec():
    fields = {
        "min_p": 0.1,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {5: -100.0, 7: 2.5},
        "min_tokens": 3,
        "allowed_token_ids": [3, 4],
    }
    for call in (completion, chat):
        spec = call(**fields, max_tokens=9).prompts[0].spec
        found = {name: getattr(spec, name) for name in fields}
        assert found == fields | {"allowed_token_ids": (3, 4)}
        assert spec.is_shaped
        plain = {"min_p": 0.5, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
        assert not call(**plain, bad_words=[], min_tokens=0).prompts[0].spec.is_shaped


def test_bad_words_are_those_with_and_without_a_space():
    encode = MODEL.tokenizer.encode_word
    spec = completion(bad_words=["import", " os"]).prompts[0].spec
    expected = [encode(text) for text in ("import", " import", "os", " os")]
    assert [list(word) for word in spec.bad_words] == expected
    assert len(set(spec.bad_words)) == 4


def test_bad_words_may_be_spaces_alone():
    for word in ("\n", " ", "  \n"):
        spec = completion(bad_words=[word]).prompts[0].spec
        assert spec.bad_words == (tuple(MODEL.tokenizer.encode_word(word)),)


def test_min_tokens_are_no_more_than_max_tokens():
    for call in (completion, chat):
        error = refusal(call, max_tokens=4, min_tokens=5)
        assert error.param == "min_tokens"
        assert error.message == "min_tokens must not be more than max_tokens, which is 4"
        assert call(max_tokens=4, min_tokens=4).prompts[0].spec.min_tokens == 4


def test_a_prompt_is_cut_to_its_last_tokens():
    ids = list(range(10, 40))
    assert completion(prompt=ids, truncate_prompt_tokens=7).prompts[0].token_ids == ids[-7:]
    assert completion(prompt=ids, truncate_prompt_tokens=70).prompts[0].token_ids == ids
    whole = chat().prompts[0].token_ids
    assert chat(truncate_prompt_tokens=3).prompts[0].token_ids == whole[-3:]
    # A prompt that would not fit does then.
    long = completion(prompt=[5] * (CONTEXT + 9), truncate_prompt_tokens=20).prompts[0]
    assert len(long.token_ids) == 20
    for max_tokens, count in ((None, CONTEXT - 16), (9, CONTEXT - 9)):
        fitting = {"prompt": [5] * (CONTEXT + 9), "max_tokens": max_tokens}
        fitted = completion(**fitting, truncate_prompt_tokens=-1).prompts[0]
        assert len(fitted.token_ids) == count
    assert completion(prompt=ids, truncate_prompt_tokens=-1).prompts[0].token_ids == ids
    assert chat(truncate_prompt_tokens=-1).prompts[0].token_ids == whole
    error = refusal(completion, max_tokens=CONTEXT, truncate_prompt_tokens=-1)
    assert "maximum context length" in error.message
    echoed = completion(prompt="one two three", truncate_prompt_tokens=1, echo=True).prompts[0]
    assert echoed.echo == MODEL.tokenizer.decode(echoed.token_ids) != "one two three"


def test_what_is_said_of_the_text_reaches_its_rules():
    rules = completion(
        stop=["a"], include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=2,
        stop_token_ids=[9],
    ).rules  # fmt: skip
    assert rules == TextRules(("a",), True, False, 2, (9,))
    assert chat().rules == TextRules()
