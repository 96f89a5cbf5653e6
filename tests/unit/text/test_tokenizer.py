"""The tokenizer against Hugging Face's own, and chat templates."""

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

from pagewire.shared.base.errors import InvalidRequestError, ModelLoadError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.chat_template import MAX_RENDERED_CHARS, ChatOptions, ChatTemplate
from pagewire.shared.text.tokenizer import Tokenizer

DEMO = Tokenizer.from_dir(demo_model_path())

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


def test_a_chat_can_begin_and_end_as_a_text_also_if_it_spells_out_a_special_token() -> None:
    backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    begin, end = (backend.token_to_id(text) for text in ("<|user|>", "<|end|>"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|user|> $A <|end|> <|end|>", special_tokens=[("<|user|>", begin), ("<|end|>", end)]
    )
    tokenizer = Tokenizer(
        backend, ChatTemplate("{{ messages[0]['content'] }}", {}), None, frozenset()
    )
    assert tokenizer.special_ends == ([begin], [end, end])
    for text in ("Hi", "", "Hi<|end|>"):
        chat = [{"role": "user", "content": text}]
        plain = tokenizer.encode_chat(chat)
        assert end not in plain
        whole = tokenizer.encode_chat(chat, add_special_tokens=True)
        assert whole == [begin, *plain, end, end]
        if "<" not in text:
            assert whole == backend.encode(text).ids


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
        options = ChatOptions(add_generation_prompt=generation)
        assert DEMO.render_chat(messages, options) == text
        assert DEMO.encode_chat(messages, options) == ids
        whole = hf_tokenizer(text, add_special_tokens=True)["input_ids"]
        assert DEMO.encode_chat(messages, options, add_special_tokens=True) == whole

    def test_special_tokens_and_size(self, hf_tokenizer: Any) -> None:
        assert DEMO.bos_token_id == hf_tokenizer.bos_token_id
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
            ("special_tokens_map.json", "\xff\xfe"),
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

    @pytest.mark.parametrize("token_id", [2**24, 2**32 - 1])
    def test_an_id_beyond_any_vocabulary_is_refused(self, model_dir: Path, token_id: int) -> None:
        """Tables of texts have an entry for each id up to the largest."""
        file = model_dir / "tokenizer.json"
        model = json.loads(file.read_text())["model"]
        edit(file, model={**model, "vocab": {**model["vocab"], "far away": token_id}})
        with pytest.raises(ModelLoadError) as caught:
            Tokenizer.from_dir(model_dir)
        assert str(caught.value) == (
            f"tokenizer.json: token 'far away' has the id {token_id}; ids must be below {2**24}"
        )

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

    def test_template_of_a_model_that_also_takes_images(self, model_dir: Path) -> None:
        """Its processor's file, if the tokenizer has none."""
        (model_dir / "chat_template.jinja").unlink()
        (model_dir / "chat_template.json").write_text('{"chat_template": "{{ bos_token }}!"}')
        assert Tokenizer.from_dir(model_dir).render_chat([]) == "<|bos|>!"
        edit(model_dir / "tokenizer_config.json", chat_template="the tokenizer's")
        assert Tokenizer.from_dir(model_dir).render_chat([]) == "the tokenizer's"

    @pytest.mark.parametrize("where", ["files", "list", "object", "file and string"])
    def test_a_template_of_its_own_for_chats_with_tools(self, model_dir: Path, where: str) -> None:
        from transformers import AutoTokenizer

        named = {"default": "plain", "tool_use": "{{ tools[0] }}"}
        of_tools = model_dir / "additional_chat_templates" / "tool_use.jinja"
        if "file" in where:
            of_tools.parent.mkdir()
            of_tools.write_text(named["tool_use"])
        if where == "files":
            (model_dir / "chat_template.jinja").write_text(named["default"])
        else:
            (model_dir / "chat_template.jinja").unlink()
            listed = [{"name": name, "template": text} for name, text in named.items()]
            template = {"list": listed, "object": named}.get(where, named["default"])
            edit(model_dir / "tokenizer_config.json", chat_template=template)
        tokenizer = Tokenizer.from_dir(model_dir)
        assert tokenizer.template_source == "{{ tools[0] }}"
        theirs = AutoTokenizer.from_pretrained(model_dir)
        chat = [{"role": "user", "content": "Hi"}]
        for tools, expected in ((None, "plain"), ([{"name": "f"}], "{'name': 'f'}")):
            assert tokenizer.render_chat(chat, ChatOptions(tools)) == expected
            if tools is not None or where != "file and string":  # theirs then forgets the string
                assert theirs.apply_chat_template(chat, tools=tools, tokenize=False) == expected

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


# What the templates of these families do, in short.
FAMILIES = {
    "llama": """{{- bos_token }}{% set system = '' %}{% if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content']|trim %}{% set messages = messages[1:] %}{% endif %}
{%- if not date_string is defined %}{% if strftime_now is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}{% endif %}{% endif %}{{ date_string ~ system }}
{%- for m in messages %}{{ '[' + m['role'] + ']' + m['content'] | trim }}{% endfor %}""",
    "qwen3": """{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}
{%- if m.role == "user" and m.content is string and not (m.content.startswith('<t>') and
    m.content.endswith('</t>')) %}{% set ns.last = index %}{% endif %}{% endfor %}
{%- for m in messages %}{% if loop.index0 > ns.last %}{{ m.content.lstrip('\\n') }}
{%- else %}{{ m.content.split('</think>')[-1].rstrip() }}{% endif %}{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}no thoughts{% endif %}""",
    "granite": """{%- for m in messages %}{% if loop.first and m.role != 'system' %}
{{- "Date: " + strftime_now('%B %d, %Y') + ".\\n" }}{% endif %}{{ m['role'] + m['content'] }}
{%- if loop.last and add_generation_prompt %}<answer{% if controls %}{{ controls|tojson }}
{%- endif %}>{% endif %}{% endfor %}""",
    "smollm3": """{%- if thinking is not defined %}{% set thinking = true %}{% endif %}
{%- if not custom_instructions %}{% set custom_instructions = "plain" %}{% endif %}
{%- for m in messages %}{% if m.role == "assistant" %}{% generation %}{{ m.content }}
{%- endgeneration %}{% else %}{{ custom_instructions ~ m.content.replace("/think", "") }}
{%- endif %}{% endfor %}{{ tools or xml_tools }}""",
    "phi": """{% for m in messages %}{% if (m['role'] in ['user', 'system']) %}
{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% elif m['role'] == 'assistant' %}
{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|a|>' }}
{% else %}{{ eos_token }}{% endif %}""",
    "olmo2": """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}
{% if not loop.last %}{{ m['content'] + eos_token + '\\n' }}{% else %}
{{ m['content'] + eos_token }}{% endif %}{% else %}{{ m['content'] }}{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}""",
}


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
            *FAMILIES.values(),
        ],
        ids=[
            "blocks",
            "break",
            "tojson",
            "namespace",
            "generation",
            "date and tokens",
            "methods",
            *FAMILIES,
        ],
    )
    def test_renders_as_hugging_face_does(self, hf_tokenizer: Any, source: str) -> None:
        messages = [{"role": "user", "content": "<café> 👋"}, {"role": "assistant", "content": "x"}]
        expected = hf_tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        assert ChatTemplate(source, names).render(messages, ChatOptions()) == expected

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
            ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}], ChatOptions())
        assert caught.value.param == "messages"

    def test_length_up_to_the_bound_is_allowed(self) -> None:
        template = ChatTemplate("{{ messages[0].content }}", {})
        full = "x" * MAX_RENDERED_CHARS
        assert template.render([{"content": full}], ChatOptions()) == full
        with pytest.raises(InvalidRequestError, match="longer than"):
            template.render([{"content": full + "x"}], ChatOptions())

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
