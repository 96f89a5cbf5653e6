"""What `LLM` takes and gives: prompts, stop conditions, several answers, chats, progress."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire import LLM, SamplingParams
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import ConfigError, InvalidRequestError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.settings.config import RouterSettings
from pagewire.shared.text.answer_text import TextAssembler

TEXT = "Lambda expressions"
ANSWER = " (sometimes called lambda forms) are used to create\nanonymous functions."
QUESTION = [{"role": "user", "content": "What is a lambda?"}]


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def module_llm(request: pytest.FixtureRequest) -> LLM:
    return LLM("demo", device="cpu", tensor_parallel_size=request.param)


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    """An engine that has nothing left to do after each test; of one rank or two."""
    yield module_llm
    assert module_llm.block_counts().used == 0
    assert not module_llm.core.has_work


def ids(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text, add_special_tokens=False)


def answers_of_seeds(llm: LLM, **fields: Any) -> set[str]:
    params = [SamplingParams(seed=seed, max_tokens=40, **fields) for seed in range(8)]
    return {output.text for output in llm.chat([QUESTION] * 8, params)}


def test_it_shows_what_it_is(llm: LLM) -> None:
    length = llm.engine.max_model_len
    shown = f"LLM('demo', device='cpu', dtype='float32', max_model_len={length})"
    assert repr(llm) == shown


@pytest.mark.parametrize(
    ("messages", "shown"), [("Hi", "str"), ([[]], "empty"), (None, "NoneType"), (5, "int")]
)
def test_what_is_not_a_conversation_is_named(llm: LLM, messages: Any, shown: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"list of messages .*, not {shown}$"):
        llm.chat(messages)


def test_unset_parameters_have_the_models_defaults(llm: LLM) -> None:
    output = llm.generate(TEXT)[0]
    assert ANSWER.startswith(output.text)
    assert len(output.token_ids) == 16
    assert llm.generate(TEXT, SamplingParams(max_tokens=4))[0].token_ids == output.token_ids[:4]
    assert len(answers_of_seeds(llm)) == 1
    assert len(answers_of_seeds(llm, temperature=1.0)) > 1


def test_calls_from_several_threads_each_get_their_own_answers(llm: LLM) -> None:
    prompts, params = [TEXT, "class"] * 4, SamplingParams(max_tokens=24)
    expected = [output.text for output in llm.generate(prompts, params)]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(llm.generate, prompts, params) for _ in range(3)]
        for call in calls:
            assert [output.text for output in call.result()] == expected


def test_without_the_models_defaults_it_samples() -> None:
    llm = LLM("demo", device="cpu", generation_config="none")
    assert len(answers_of_seeds(llm)) > 1
    assert len(answers_of_seeds(llm, temperature=0.0)) == 1


def test_the_models_answer_length_is_a_default_and_not_a_cap(tmp_path: Path) -> None:
    for file in demo_model_path().iterdir():
        if file.suffix in {".json", ".jinja", ".safetensors"}:
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 3}')
    llm = LLM(tmp_path, device="cpu")
    assert len(llm.generate(TEXT)[0].token_ids) == 3
    assert len(llm.generate(TEXT, SamplingParams(max_tokens=9))[0].token_ids) == 9
    assert len(llm.chat(QUESTION)[0].token_ids) == 3


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean gpu_memory_utilization"):
        LLM("demo", gpu_memory_utilisation=0.5)


@pytest.mark.parametrize("name", ["redis_url", "cluster_secret", "lease_s"])
def test_a_setting_of_a_cluster_is_none_of_its_own(name: str, llm: LLM) -> None:
    assert name not in type(llm.settings).model_fields
    with pytest.raises(ConfigError, match=f"{name} is not a setting; "):
        LLM("demo", **{name: "x"})


def test_a_clusters_environment_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CLUSTER_SECRET", "short")  # no worker would take it
    assert LLM("demo", device="cpu", num_blocks=64).settings.num_blocks == 64


# Prompts


def test_each_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(TEXT)
    expected = llm.generate(TEXT)[0]
    assert (expected.prompt, expected.prompt_token_ids) == (TEXT, tokens)
    of_numpy = list(np.array(tokens))
    forms = ({"prompt": TEXT}, {"prompt_token_ids": tokens}, tokens, tuple(tokens), of_numpy)
    for prompt in forms:
        for given in (prompt, [prompt]):
            output = llm.generate(given)[0]
            assert output.outputs == expected.outputs
            assert output.prompt_token_ids == tokens
            assert output.prompt == (TEXT if "prompt" in prompt else None)
    both = llm.generate({"prompt": "its text", "prompt_token_ids": tokens})[0]
    assert (both.prompt, both.outputs) == ("its text", expected.outputs)
    assert [o.prompt for o in llm.generate(text for text in (TEXT, "A lambda"))] == [
        TEXT,
        "A lambda",
    ]


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        [None],
        5,
        1.5,
        b"text",
        {},
        {"prompt": None},
        {"prompt": 5},
        {"text": "x"},
        {"prompt": "x", "multi_modal_data": {}},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [True]},
        [{"prompt": "x"}, {"prompt": ["x"]}],
        pytest.param(object(), id="object"),
    ],
    ids=repr,
)
def test_what_is_not_a_prompt_is_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts)
    assert caught.value.param == "prompts"


def test_a_prompt_that_does_not_fit_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: a prompt of 5000 tokens"):
        llm.generate(["short", [1] * 5000])


@pytest.mark.parametrize("params", [{"temperature": 0}, [{}], 5, "x", [None]], ids=repr)
def test_what_is_not_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
        llm.generate([TEXT], params)


# Stop conditions, as the router has them


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("anonymous", " (sometimes called lambda forms) are used to create\n", "anonymous"),
        (["functions", "create"], " (sometimes called lambda forms) are used to ", "create"),
        ("forms) are", " (sometimes called lambda ", "forms) are"),
        ("never there", ANSWER, None),
    ],
)
def test_stop_strings_end_an_answer(llm: LLM, stop: Any, text: str, reason: str | None) -> None:
    output = llm.generate(TEXT, SamplingParams(max_tokens=23, stop=stop))[0]
    answer = output.outputs[0]
    assert answer.text == text[: len(answer.text)]
    assert (answer.stop_reason, answer.finish_reason == "stop") == (reason, reason is not None)
    if reason is not None:
        assert answer.text == text


def test_stop_strings_cut_as_the_router_does(llm: LLM) -> None:
    assert llm.tokenizer is not None
    whole = llm.generate(TEXT, SamplingParams(max_tokens=40))[0]
    for stop in ("used", "lambda", "\n", " (", "s"):
        offline = llm.generate(TEXT, SamplingParams(max_tokens=40, stop=stop))[0]
        router = TextAssembler(llm.tokenizer, whole.prompt_token_ids, [stop])
        delta = router.push(whole.token_ids, "length")
        assert (offline.text, offline.token_ids) == (delta.text, list(delta.token_ids))
        assert offline.finish_reason == delta.finish_reason == "stop"


def test_stop_tokens_end_an_answer(llm: LLM) -> None:
    token = ids(llm, " used")[-1]
    answer = llm.generate(TEXT, SamplingParams(max_tokens=40, stop_token_ids=[token]))[0]
    assert answer.token_ids[-1] == token
    assert (answer.finish_reason, answer.outputs[0].stop_reason) == ("stop", token)
    ended = llm.chat(QUESTION)[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)  # the model's own end


def test_texts_are_as_asked_for(llm: LLM) -> None:
    token = ids(llm, " used")[-1]
    plain = SamplingParams(max_tokens=40, stop_token_ids=[token])
    (short,) = llm.generate(TEXT, plain)
    shown = SamplingParams(max_tokens=40, stop_token_ids=[token], include_stop_str_in_output=True)
    assert llm.generate(TEXT, shown)[0].text == short.text + " used"
    answer = llm.chat(QUESTION, SamplingParams(skip_special_tokens=False))[0]
    whole = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    ended = llm.chat(QUESTION, whole)[0]
    assert llm.tokenizer is not None
    assert ended.text == answer.text + llm.tokenizer.token_bytes.text(ended.token_ids[-1])
    assert ended.text == llm.tokenizer.decode(ended.token_ids, skip_special_tokens=False)


def test_prompts_are_cut_and_bad_words_do_not_come(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, SamplingParams(max_tokens=9))
    (cut,) = llm.generate(TEXT, SamplingParams(max_tokens=9, truncate_prompt_tokens=3))
    assert cut.prompt_token_ids == whole.prompt_token_ids[-3:]
    bad = whole.text.split()[0]
    (other,) = llm.generate(TEXT, SamplingParams(max_tokens=9, bad_words=[bad]))
    assert other.text.split()[0] != bad
    for name, value in (
        ("allowed_token_ids", [10**6]),
        ("logit_bias", {10**6: 1.0}),
        ("logit_bias", {1: 1000.0}),
        ("min_tokens", 10**5),
        ("truncate_prompt_tokens", 0),
        ("bad_words", "text"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(TEXT, SamplingParams(**{name: value}))
        assert caught.value.param == name


def test_parameters_may_differ_by_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=40, stop="used")]
    short, stopped = llm.generate([TEXT, TEXT], params)
    assert (short.finish_reason, len(short.token_ids)) == ("length", 3)
    assert (stopped.finish_reason, stopped.text[-4:]) == ("stop", "are ")


# Several answers


def test_n_answers_are_those_of_the_seeds_that_the_router_gives(llm: LLM) -> None:
    asked = SamplingParams(n=3, temperature=3.0, seed=7, max_tokens=12)
    output = llm.generate("The", asked)[0]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    defaults = ServedModel.load(RouterSettings()).defaults
    for answer in output.outputs:
        seed = asked.resolve(defaults, 12).for_choice(answer.index).seed
        alone = llm.generate("The", SamplingParams(temperature=3.0, seed=seed, max_tokens=12))[0]
        assert (alone.text, alone.token_ids) == (answer.text, answer.token_ids)
    assert len({answer.text for answer in output.outputs}) > 1
    assert output.text == output.outputs[0].text
    assert output.token_ids == output.outputs[0].token_ids


def test_prompt_of_n_answers_is_computed_once(llm: LLM) -> None:
    stats = llm.core.stats
    before = stats.prompt_tokens_computed
    asked = SamplingParams(n=5, temperature=3.0, seed=7, max_tokens=4, prompt_logprobs=0)
    output = llm.generate("Fork, and share the prompt. " * 9, asked)[0]
    num_tokens = len(output.prompt_token_ids)
    assert num_tokens > 16  # more than a block
    # Each further answer runs the prompt's last token again, to sample from it.
    assert stats.prompt_tokens_computed - before == num_tokens + 4
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == num_tokens
    assert [len(answer.token_ids) for answer in output.outputs] == [4] * 5
    assert llm.block_counts().used == 0


def test_a_prompt_may_go_without_the_special_tokens_of_a_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    asked = SamplingParams(max_tokens=1)
    prompts = [TEXT, {"prompt": TEXT}]
    for output in llm.generate(prompts, asked, add_special_tokens=False):
        assert output.prompt_token_ids == llm.tokenizer.encode_word(TEXT)
        assert output.prompt_token_ids != llm.tokenizer.encode(TEXT)


# Chats


def test_chat_answers_by_the_template(llm: LLM) -> None:
    assert llm.tokenizer is not None
    alone = llm.chat(QUESTION)[0]
    assert alone.prompt == llm.tokenizer.render_chat(QUESTION)
    assert alone.prompt_token_ids == llm.tokenizer.encode_chat(QUESTION)
    assert alone.text.startswith("Lambda expressions" + ANSWER[:20])
    assert alone.finish_reason == "stop"  # 16 tokens would not have been enough
    begun = llm.chat(QUESTION, SamplingParams(max_tokens=1), add_special_tokens=True)[0]
    assert begun.prompt_token_ids == [llm.tokenizer.bos_token_id, *alone.prompt_token_ids]
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is a lambda?"}]}]
    assert [o.text for o in llm.chat([QUESTION, parts])] == [alone.text] * 2
    assert llm.chat(QUESTION, SamplingParams(max_tokens=2))[0].finish_reason == "length"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hello",
        [5],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [[]],
    ],
    ids=repr,
)
def test_what_is_not_a_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat(messages)


# Progress

PROGRAM = """
from pagewire import LLM
LLM("demo", device="cpu").generate(["Lambda expressions"] * 3, use_tqdm={wanted})
"""


def run_on_a_terminal(wanted: bool) -> str:
    main, side = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM.format(wanted=wanted)],
            stderr=side,
            stdout=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
            timeout=60,
            check=True,
        )
        os.close(side)
        shown = b""
        try:
            while part := os.read(main, 4096):
                shown += part
        except OSError:  # Linux's way to say that the other side is closed
            pass
    finally:
        os.close(main)
    assert done.stdout == b""
    return shown.decode()


def test_a_progress_bar_shows_on_a_terminal_unless_unwanted() -> None:
    shown = run_on_a_terminal(wanted=True)
    assert "3/3" in shown
    assert "output tokens/s" in shown
    assert run_on_a_terminal(wanted=False) == ""


def test_no_progress_bar_without_a_terminal(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([TEXT])
    assert capfd.readouterr() == ("", "")


def test_cached_blocks_are_shared_within_a_salt_only(llm: LLM) -> None:
    prompt = ids(llm, "The with statement is used to wrap the execution of a block. " * 8)

    def ask(salt: str | None, tail: list[int]) -> tuple[int, list[int]]:
        params = SamplingParams(max_tokens=24, cache_salt=salt)
        output = llm.generate([prompt + tail], params)[0]
        return output.cached_tokens, output.token_ids

    size = llm.core.scheduler.blocks.size
    most = (len(prompt) - 1) // size * size
    first = [ask(salt, []) for salt in ("salt a", "salt b", "salt", None)]
    assert [cached for cached, _ in first[:3]] == [0, 0, 0]
    assert [ask(salt, [])[0] for salt in ("salt a", "salt b", "salt", None)] == [most] * 4
    assert len({tuple(tokens) for _, tokens in first}) == 1
    # What an answer has filled is salted as well.
    tokens = first[0][1]
    assert ask("salt a", tokens)[0] > most
    assert ask("salt c", tokens)[0] == 0
