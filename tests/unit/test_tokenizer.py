"""The tokenizer against Hugging Face's own, chat templates, and detokenizing part by part."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.errors import InvalidRequestError, ModelLoadError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.chat_template import MAX_RENDERED_CHARS, ChatTemplate
from pagewire.shared.text.detokenizer import ContextDetokenizer, make_detokenizer
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.sentencepiece import sentencepiece_tokenizer

DEMO = Tokenizer.from_dir(demo_model_path())

BYTE_IDS = [i for i in range(DEMO.vocab_size) if len(DEMO.token_bytes.of(i)) == 1]

# Text in which nothing reads as a special token, which decoding would leave out.
PLAIN_TEXT = st.text().filter(lambda text: "<|" not in text)
TEXTS = {
    "english": "The import statement combines two operations.",
    "code": "def f(x):\n\treturn  x + 1\n",
    "multibyte": "naïve — 日本語 Ελληνικά",
    "emoji": "👋🏽 family 👨‍👩‍👧‍👦 flag 🇨🇭",
    "spaces": "  leading, trailing  and\u00a0hard  ",
    "control": "nul \x00 and bell \x07",
    "special token inside": "a<|end|>b<|user|>",
    "empty": "",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "What is a lambda?"}],
    "system": [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Hi"},
    ],
    "many turns": [
        {"role": "user", "content": " spaces "},
        {"role": "assistant", "content": "línea\n\n👋"},
        {"role": "user", "content": ""},
    ],
}


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A copy of the demo model's small files, to be corrupted."""
    for file in demo_model_path().iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def edit(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


class TestAgainstHuggingFace:
    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
    @pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
    def test_encode(self, hf_tokenizer: Any, text: str, special: bool) -> None:
        expected = hf_tokenizer.encode(text, add_special_tokens=special)
        assert DEMO.encode(text, add_special_tokens=special) == expected

    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
    @pytest.mark.parametrize("skip", [True, False], ids=["skip special", "keep special"])
    def test_decode(self, hf_tokenizer: Any, text: str, skip: bool) -> None:
        ids = DEMO.encode(text)
        assert DEMO.decode(ids, skip) == hf_tokenizer.decode(ids, skip_special_tokens=skip)

    @pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
    @pytest.mark.parametrize("generation", [True, False], ids=["prompt", "no prompt"])
    def test_chat(self, hf_tokenizer: Any, messages: list[Any], generation: bool) -> None:
        text = hf_tokenizer.apply_chat_template(
            messages, add_generation_prompt=generation, tokenize=False
        )
        ids = hf_tokenizer.apply_chat_template(
            messages, add_generation_prompt=generation, return_dict=False
        )
        assert DEMO.render_chat(messages, generation) == text
        assert DEMO.encode_chat(messages, generation) == ids

    def test_special_tokens_and_size(self, hf_tokenizer: Any) -> None:
        assert DEMO.bos_token_id == hf_tokenizer.bos_token_id
        assert hf_tokenizer.eos_token_id in DEMO.eos_token_ids
        assert hf_tokenizer.convert_tokens_to_ids("<|end|>") in DEMO.eos_token_ids
        assert DEMO.vocab_size == len(hf_tokenizer)
        assert DEMO.has_chat_template


class TestEncode:
    @given(PLAIN_TEXT)
    def test_any_text_survives(self, text: str) -> None:
        assert DEMO.decode(DEMO.encode(text)) == text

    def test_lone_surrogate_is_the_clients_fault(self) -> None:
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            DEMO.encode("a\ud800b")

    def test_truncation_and_padding_of_the_file_are_ignored(self, model_dir: Path) -> None:
        backend = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        backend.enable_truncation(4)
        backend.enable_padding(length=99)
        backend.save(str(model_dir / "tokenizer.json"))
        text = TEXTS["english"]
        assert Tokenizer.from_dir(model_dir).encode(text) == DEMO.encode(text)

    def test_unknown_ids_decode_to_nothing(self) -> None:
        assert DEMO.decode([10**6, *DEMO.encode("hello"), 99_999]) == "hello"


@pytest.mark.parametrize(
    "detokenizer", [make_detokenizer, ContextDetokenizer], ids=["table", "context"]
)
class TestDetokenizers:
    @given(PLAIN_TEXT, st.text(max_size=8), st.integers(1, 4))
    def test_any_text_comes_back(self, detokenizer: Any, text: str, prompt: str, step: int) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        stream = detokenizer(DEMO, DEMO.encode(prompt))
        parts = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
        assert "".join(parts) + stream.flush() == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)

    @given(st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=200))
    def test_any_ids_come_back_as_decode_has_them(self, detokenizer: Any, ids: list[int]) -> None:
        stream = detokenizer(DEMO, DEMO.encode("prompt"))
        assert stream.push(ids) + stream.flush() == DEMO.decode(ids)

    @given(
        st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=200),
        st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=12),
    )
    def test_all_at_once_gives_what_one_by_one_does(
        self, detokenizer: Any, ids: list[int], prompt: list[int]
    ) -> None:
        stream = detokenizer(DEMO, prompt)
        one_by_one = stream.push(ids) + stream.flush()
        assert detokenizer(DEMO, prompt).finish(ids) == one_by_one

    def test_emoji_appears_with_its_last_token(self, detokenizer: Any) -> None:
        ids = DEMO.encode("👋", add_special_tokens=False)
        assert len(ids) > 1
        stream = detokenizer(DEMO, DEMO.encode("Hi "))
        assert [stream.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["👋"]
        assert stream.flush() == ""

    def test_prompt_may_end_inside_a_character(self, detokenizer: Any) -> None:
        ids = DEMO.encode("a👋b", add_special_tokens=False)
        for cut in range(2, len(ids) - 1):
            stream = detokenizer(DEMO, ids[:cut])
            assert stream.push(ids[cut:]) + stream.flush() == "👋b"

    @pytest.mark.parametrize("text", ["a …b", "x  日本", " é é", "1 👋 👋"])
    def test_what_a_prompt_has_finished_is_not_given_out_again(
        self, detokenizer: Any, text: str
    ) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        for cut in range(1, len(ids)):
            before = DEMO.decode(ids[:cut]).rstrip("\ufffd")
            stream = detokenizer(DEMO, ids[:cut])
            assert stream.push(ids[cut:]) + stream.flush() == text.removeprefix(before), cut

    def test_unfinished_character_comes_with_the_end(self, detokenizer: Any) -> None:
        ids = DEMO.encode("ok👋", add_special_tokens=False)
        stream = detokenizer(DEMO, [])
        assert stream.push(ids[:-1]) == "ok"
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""

    @pytest.mark.parametrize("text", ["\ufffd" * 100, "日" * 100], ids=["U+FFFD", "han"])
    def test_long_runs_of_many_token_characters(self, detokenizer: Any, text: str) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        stream = detokenizer(DEMO, [])
        assert "".join(stream.push([i]) for i in ids) + stream.flush() == text

    def test_garbage_is_not_held_for_ever(self, detokenizer: Any) -> None:
        lead = DEMO.encode("👋", add_special_tokens=False)[0]
        stream = detokenizer(DEMO, [])
        parts = [stream.push([lead]) for _ in range(1000)]
        assert len("".join(parts)) > 900
        assert "".join(parts) + stream.flush() == DEMO.decode([lead] * 1000)

    def test_special_tokens_are_silent(self, detokenizer: Any) -> None:
        end = DEMO.encode("<|end|>", add_special_tokens=False)
        ids = DEMO.encode("done", add_special_tokens=False)
        stream = detokenizer(DEMO, end)
        assert stream.push([*ids, *end]) + stream.flush() == "done"


class TestTable:
    """Against the tokenizer's own decode, of the prompt and the answer together."""

    @given(
        st.lists(st.integers(0, DEMO.vocab_size + 3), max_size=12),
        st.lists(st.integers(0, DEMO.vocab_size + 3), max_size=60),
        st.integers(1, 5),
    )
    def test_any_ids(self, prompt: list[int], ids: list[int], step: int) -> None:
        assert DEMO.text_table is not None
        stream = make_detokenizer(DEMO, prompt)
        parts = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
        assert DEMO.decode(prompt + ids) in _wholes(prompt, "".join(parts) + stream.flush())

    @given(st.lists(st.sampled_from(BYTE_IDS), max_size=4), st.lists(st.sampled_from(BYTE_IDS)))
    def test_any_bytes(self, prompt: list[int], ids: list[int]) -> None:
        stream = make_detokenizer(DEMO, prompt)
        text = "".join([stream.push([i]) for i in ids]) + stream.flush()
        assert DEMO.decode(prompt + ids) in _wholes(prompt, text)

    def test_a_replacement_character_that_the_prompt_began_is_the_answers(self) -> None:
        ids = DEMO.encode("\ufffd", add_special_tokens=False)
        assert len(ids) > 1
        assert make_detokenizer(DEMO, ids[:1]).finish(ids[1:]) == "\ufffd"
        assert make_detokenizer(DEMO, ids[:1]).finish(DEMO.encode("a")[-1:]) == "a"

    def test_a_decoder_that_looks_at_neighbours_has_none(self, sentencepiece: Tokenizer) -> None:
        assert sentencepiece.text_table is None

    def test_a_vocabulary_that_decodes_to_other_text_has_none(self) -> None:
        backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
        assert Tokenizer(backend, None, None, frozenset()).text_table is not None
        backend.add_tokens(["\u00e9"])  # one byte in a byte-level vocabulary, and no text
        assert Tokenizer(backend, None, None, frozenset()).text_table is None


def _wholes(prompt: list[int], answer: str) -> list[str]:
    """The texts that prompt and answer may be together: the prompt's last character, if it is
    unfinished, is finished by the answer or stays a U+FFFD."""
    shown = DEMO.decode(prompt)
    return [shown + answer, shown.removesuffix("\ufffd") + answer]


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return sentencepiece_tokenizer()


class TestSentencePieceStyle:
    @pytest.mark.parametrize("prompt", ["", "hi", "日"], ids=["empty", "ascii", "bytes"])
    def test_stream_is_decode_minus_the_prompt(self, sentencepiece: Tokenizer, prompt: str) -> None:
        prompt_ids = [1, *sentencepiece.encode(prompt)]
        ids = sentencepiece.encode("hello world 日本 👋 bye")
        stream = make_detokenizer(sentencepiece, prompt_ids)
        parts = [stream.push([i]) for i in ids]
        whole = sentencepiece.decode([*prompt_ids, *ids])
        assert "".join(parts) + stream.flush() == whole.removeprefix(prompt)
        assert not any("\ufffd" in part for part in parts)


class TestFromDir:
    def test_missing_tokenizer_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
            Tokenizer.from_dir(tmp_path)

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("tokenizer.json", "{"),
            ("tokenizer.json", '{"model": {"type": "Nonsense"}}'),
            ("tokenizer_config.json", "{"),
            ("tokenizer_config.json", "[]"),
            ("generation_config.json", "\xff\xfe"),
            ("chat_template.jinja", "{% for %}"),
        ],
    )
    def test_a_corrupt_file_is_one_line_that_names_the_file(
        self, model_dir: Path, file: str, content: str
    ) -> None:
        (model_dir / file).write_bytes(content.encode("latin-1"))
        with pytest.raises(ModelLoadError) as caught:
            Tokenizer.from_dir(model_dir)
        assert "\n" not in str(caught.value)
        assert file.split(".")[0].replace("_", " ") in str(caught.value).replace("_", " ")

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [([3, 4], [5], {3, 4}), (3, None, {3}), (None, 6, {6}), (None, None, {1})],
        ids=["list", "one number", "config.json", "the tokenizer's"],
    )
    def test_eos_comes_from_the_first_file_that_has_it(
        self, model_dir: Path, generation: Any, config: Any, expected: set[int]
    ) -> None:
        edit(model_dir / "generation_config.json", eos_token_id=generation)
        edit(model_dir / "config.json", eos_token_id=config)
        assert Tokenizer.from_dir(model_dir).eos_token_ids == expected

    def test_special_token_as_an_object(self, model_dir: Path) -> None:
        edit(model_dir / "tokenizer_config.json", bos_token={"content": "<|bos|>", "lstrip": False})
        assert Tokenizer.from_dir(model_dir).bos_token_id == DEMO.bos_token_id

    @pytest.mark.parametrize(
        "template",
        [
            "{{ bos_token }}!",
            [
                {"name": "tools", "template": "x"},
                {"name": "default", "template": "{{ bos_token }}!"},
            ],
        ],
        ids=["string", "named list"],
    )
    def test_template_in_the_configuration(self, model_dir: Path, template: Any) -> None:
        (model_dir / "chat_template.jinja").unlink()
        edit(model_dir / "tokenizer_config.json", chat_template=template)
        assert Tokenizer.from_dir(model_dir).render_chat([]) == "<|bos|>!"

    def test_without_template_chat_is_refused(self, model_dir: Path) -> None:
        (model_dir / "chat_template.jinja").unlink()
        tokenizer = Tokenizer.from_dir(model_dir)
        assert not tokenizer.has_chat_template
        with pytest.raises(InvalidRequestError, match="no chat template") as caught:
            tokenizer.render_chat([{"role": "user", "content": "hi"}])
        assert caught.value.param == "messages"

    def test_needs_neither_torch_nor_transformers(self) -> None:
        code = (
            "import sys, pagewire.shared.text.tokenizer, pagewire.shared.model.demo\n"
            "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == "[]"


class TestChatTemplate:
    @pytest.mark.parametrize(
        "source",
        [
            "{% for m in messages %}\n  {% if loop.first %}\n {{ m }}\n{% endif %}\n{% endfor %}",
            "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
            "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
            "{% set ns = namespace(n=0) %}{% if messages %}{% set ns.n = 7 %}{% endif %}{{ ns.n }}",
            "{% generation %}{{ messages[0].content }}{% endgeneration %} {{ tools is none }}",
            "{{ strftime_now('%Y') }}{{ bos_token }}{{ eos_token }}",
            "{{ messages[0]['content'].split('é')[0] | trim }}{{ add_generation_prompt }}",
        ],
        ids=["blocks", "break", "tojson", "namespace", "generation", "date and tokens", "methods"],
    )
    def test_renders_as_hugging_face_does(self, hf_tokenizer: Any, source: str) -> None:
        messages = [{"role": "user", "content": "<café> 👋"}, {"role": "assistant", "content": "x"}]
        expected = hf_tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        assert ChatTemplate(source, names).render(messages, True) == expected

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[7].content.x.y }}", "refuses"),
            ("{{ 'a' + messages[0].missing_field.lower() }}", "refuses"),
            ("{{ 'a' + none }}", "refuses"),
            ("{{ 1 / 0 }}", "refuses"),
            ("{{ messages.append(1) }}", "refuses"),
            ("{{ ''.__class__.__mro__ }}", "refuses"),
            ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "longer than"),
        ],
        ids=["raise", "index", "missing", "type", "zero", "mutation", "escape", "endless"],
    )
    def test_failure_is_the_clients_with_the_templates_words(
        self, source: str, message: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}], True)
        assert caught.value.param == "messages"

    def test_length_up_to_the_bound_is_allowed(self) -> None:
        template = ChatTemplate("{{ messages[0].content }}", {})
        full = "x" * MAX_RENDERED_CHARS
        assert template.render([{"content": full}], True) == full
        with pytest.raises(InvalidRequestError, match="longer than"):
            template.render([{"content": full + "x"}], True)

    def test_demo_template_names_an_unknown_role(self) -> None:
        with pytest.raises(InvalidRequestError, match="not wizard"):
            DEMO.render_chat([{"role": "wizard", "content": "hi"}])


def test_a_long_text_lets_other_threads_run() -> None:
    tokenizer = Tokenizer.from_dir(demo_model_path())
    done = threading.Event()
    turns = 0

    def take_turns() -> None:
        nonlocal turns
        while not done.is_set():
            time.sleep(0.001)
            turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    try:
        before = turns
        tokenizer.encode("\u00e9\U0001f600" * 100_000)
        meanwhile = turns - before
    finally:
        done.set()
        other.join()
    assert meanwhile > 10
