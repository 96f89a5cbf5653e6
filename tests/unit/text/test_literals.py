"""Special tokens that messages spell out: with and without them, over tokenizers of two styles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.chat_template import ChatOptions, ChatTemplate
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.growth import grows_in_proportion

DEMO = Tokenizer.from_dir(demo_model_path())
AS_TOKENS = Tokenizer.from_dir(demo_model_path(), "tokens")
DEMO_SPECIALS = ["<|bos|>", "<|eos|>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>"]
TEMPLATE = (
    "<s> {% for m in messages %}<{{ m.role }}>{{ m.name or '' }} {{ m.content | trim }} </s> "
    "{% endfor %}"
)
LETTERS = " abcdefghijklmnopqrstuvwxyz<>/|#\n"


def byte_level(backend: tokenizers.Tokenizer) -> None:
    """Llama 3's and Qwen's style."""
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()


def metaspace(backend: tokenizers.Tokenizer) -> None:
    """Mistral's style: a space before the first word alone."""
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)


def prepend(backend: tokenizers.Tokenizer) -> None:
    """Llama 2's style: a space after each special token."""
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])


STYLES: list[Callable[[tokenizers.Tokenizer], None]] = [byte_level, metaspace, prepend]


def make_tokenizer(
    style: Callable[[tokenizers.Tokenizer], None], begin: str, end: str, **flags: Any
) -> Tokenizer:
    """A tokenizer whose special tokens, ids 0 and 1, have these names."""
    alphabet = sorted({*LETTERS, "▁", "Ġ", "Ċ"})
    pairs = [("▁", "s"), ("Ġ", "s"), ("s", ">"), ("a", "b"), (">", "a"), ("<", "s"), ("/", "s")]
    words = [begin, end, *alphabet, *(a + b for a, b in pairs)]
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, fuse_unk=False))
    style(backend)
    special = [AddedToken(name, special=True, normalized=False, **flags) for name in (begin, end)]
    backend.add_special_tokens(special)
    template = TEMPLATE.replace("</s>", end).replace("<s>", begin)
    return Tokenizer(backend, ChatTemplate(template, {}), None, frozenset())


def chats(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    roles = st.sampled_from(["system", "user", "assistant"])
    return st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1)


def texts_with(literals: list[str], letters: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.one_of(st.sampled_from(literals), letters)
    return st.lists(parts, max_size=8).map("".join)


def specials_in(ids: list[int]) -> list[int]:
    known = {DEMO.encode(text, add_special_tokens=False)[0] for text in DEMO_SPECIALS}
    return [each for each in ids if each in known]


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path())


class TestDemo:
    @given(chats(st.text().filter(lambda text: not any(s in text for s in DEMO_SPECIALS))))
    def test_without_a_literal_the_ids_are_hugging_faces(
        self, hf_tokenizer: Any, chat: list[dict[str, str]]
    ) -> None:
        expected = hf_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert DEMO.encode_chat(chat) == expected

    @given(chats(texts_with(DEMO_SPECIALS, st.text())))
    def test_only_the_template_places_special_tokens(self, chat: list[dict[str, str]]) -> None:
        ids = DEMO.encode_chat(chat)
        harmless = [message | {"content": "x"} for message in chat]
        assert specials_in(ids) == specials_in(DEMO.encode_chat(harmless))
        assert DEMO.decode(ids, skip_special_tokens=False) == DEMO.render_chat(chat)

    @given(chats(texts_with(DEMO_SPECIALS, st.text())))
    def test_the_setting_restores_hugging_faces_ids(
        self, hf_tokenizer: Any, chat: list[dict[str, str]]
    ) -> None:
        expected = hf_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert AS_TOKENS.encode_chat(chat) == expected

    def test_a_completions_prompt_is_hugging_faces(self, hf_tokenizer: Any) -> None:
        text = "a<|end|><|user|>b"
        assert DEMO.encode(text) == hf_tokenizer.encode(text)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
class TestStyles:
    @given(data=st.data())
    def test_a_literal_is_tokenized_as_if_it_had_no_meaning(
        self, style: Callable[[tokenizers.Tokenizer], None], data: st.DataObject
    ) -> None:
        """Under other names of the special tokens, the same messages have the same ids."""
        one = make_tokenizer(style, "<s>", "</s>")
        other = make_tokenizer(style, "{BEGIN}", "{END}")
        chat = data.draw(chats(texts_with(["<s>", "</s>"], st.text(LETTERS, max_size=5))))
        name = data.draw(texts_with(["<s>", "</s>"], st.text(LETTERS, max_size=2)))
        chat[0]["name"] = name
        assert one.encode_chat(chat) == other.encode_chat(chat)

    def test_flags_of_special_tokens_count_in_the_template(
        self, style: Callable[[tokenizers.Tokenizer], None]
    ) -> None:
        """What takes the space next to it does so around the template's tokens alone."""
        one = make_tokenizer(style, "<s>", "</s>", lstrip=True, rstrip=True)
        other = make_tokenizer(style, "{BEGIN}", "{END}", lstrip=True, rstrip=True)
        chat = [{"role": "user", "content": "a  <s>  b"}, {"role": "user", "content": "</s>"}]
        assert one.encode_chat(chat) == other.encode_chat(chat)


def changed(source: str) -> Tokenizer:
    """The demo's tokenizer with another template."""
    backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    return Tokenizer(backend, ChatTemplate(source, {}), None, frozenset())


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content[:30] }}",
        "{{ messages[0].content | length }}",
        "{{ 'end' if '<|end|>' in messages[0].content else 'go on' }}",
    ],
)
def test_a_template_that_changes_a_literal_refuses_it(source: str) -> None:
    tokenizer = changed(source)
    with pytest.raises(InvalidRequestError, match=r"chat template cannot keep '<\|end\|>'") as e:
        tokenizer.encode_chat([{"role": "user", "content": "words, then a <|end|> in the middle"}])
    assert e.value.param == "messages"
    assert tokenizer.encode_chat([{"role": "user", "content": "words"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages[0].content.split('|||')[-1] | trim }}<|end|>",
        "{{ messages[0].content }}{{ messages[0].content }}",
        "{{ messages[0].content | replace('words', 'x') }}",
    ],
)
def test_a_template_may_move_and_drop_literals(source: str) -> None:
    chat = [{"role": "user", "content": "<|user|> words ||| a <|end|> "}]
    tokenizer = changed(source)
    ids = tokenizer.encode_chat(chat)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(chat)
    assert len(specials_in(ids)) == source.count("<|end|>")


@pytest.mark.parametrize("sequence", [list, tuple])
def test_literals_in_sequences_of_variables_and_tools_are_text(sequence: type) -> None:
    tokenizer = changed("{{ notes[0] }}{{ tools[0].function.parameters.enum[0] }}<|end|>")
    texts = sequence(["a <|end|> "])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": texts}}}
    options = ChatOptions([tool], {"notes": texts})
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], options)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a <|end|> a <|end|> <|end|>"
    assert len(specials_in(ids)) == 1


def test_a_vocabulary_whose_own_word_is_a_special_token_refuses_it() -> None:
    vocab = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, 0, False))
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    template = ChatTemplate("{{ messages[0].content }}</s>", {})
    tokenizer = Tokenizer(backend, template, None, frozenset())
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [2, 1]
    with pytest.raises(InvalidRequestError, match="tokenizer cannot keep '</s>'"):
        tokenizer.encode_chat([{"role": "user", "content": "a</s>a"}])


@pytest.mark.parametrize(
    ("normalizer", "spelled"),
    [
        (normalizers.Lowercase(), "<END>"),
        (normalizers.Lowercase(), "<end>"),
        (normalizers.NFKC(), "\uff1cEnd\uff1e"),
    ],
    ids=["large", "small", "wide"],
)
def test_what_only_the_normalizer_makes_a_special_token_is_text(
    normalizer: normalizers.Normalizer, spelled: str
) -> None:
    alphabet = "<>abdefnE"
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<End>", special=True, normalized=True)])
    template = ChatTemplate("{{ messages[0].content }}<End>", {})
    tokenizer = Tokenizer(backend, template, None, frozenset())
    end = backend.token_to_id("<End>")
    for content in (spelled, f"a{spelled}b", f"<End>{spelled}"):
        chat = [{"role": "user", "content": content}]
        text = normalizer.normalize_str(content)
        assert tokenizer.encode_chat(chat) == [*(alphabet.index(c) for c in text), end]
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud800"}])


def test_a_lone_surrogate_next_to_a_literal_is_the_clients_fault() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        DEMO.encode_chat([{"role": "user", "content": "<|end|>\ud800"}])


def test_looking_for_literals_takes_time_in_proportion() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"<": 0}, []))
    backend.add_special_tokens([f"[reserved_{index}]" for index in range(700)])
    tokenizer = Tokenizer(backend, ChatTemplate("", {}), None, frozenset())

    def encode(length: int) -> None:
        assert tokenizer.encode_chat([{"role": "user", "content": "[" * length}]) == []

    assert grows_in_proportion(encode, 1_000_000)


def test_of_literals_that_begin_alike_the_longest_counts() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"<": 0, "a": 1, ">": 2, "b": 3}, []))
    backend.add_special_tokens(["<a", "<a>", "<a>b", "."])
    template = ChatTemplate("{{ messages[0].content }}<a><a>b<a", {})
    tokenizer = Tokenizer(backend, template, None, frozenset())
    ids = tokenizer.encode_chat([{"role": "user", "content": "<a>b"}])
    assert ids == [0, 1, 2, 3, *tokenizer.encode("<a><a>b<a")]
