"""Turns text into token ids and back, and renders chat templates, without torch.

The router and the offline `LLM` share it. It reads the files of a Hugging Face model directory:
`tokenizer.json`, `tokenizer_config.json`, and the chat template.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from pagewire.shared.base.errors import InvalidRequestError, ModelLoadError
from pagewire.shared.model.tokenizer_files import TOKENIZER_FILE, read_optional_json
from pagewire.shared.model.tokenizer_loading import load_tokenizer
from pagewire.shared.settings.types import SpecialTokens
from pagewire.shared.text.chat_template import (
    ChatOptions,
    ChatTemplate,
    RequestTemplate,
    TemplateFix,
    read_template,
)
from pagewire.shared.text.encoding import Encoder
from pagewire.shared.text.literals import Literals
from pagewire.shared.text.markers import Markers
from pagewire.shared.text.piece_table import PieceTable, piece_table
from pagewire.shared.text.token_bytes import TokenBytes

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NO_OPTIONS = ChatOptions()
# Tables have an entry for each id up to the largest; no model has this many.
_MOST_IDS = 1 << 24
_MOST_TABLES = 3  # with one model's markers, with all special tokens, and without any
_Table = TypeVar("_Table", list[bytes], PieceTable)


class Tokenizer:
    """A model's tokenizer: encodes, decodes, renders conversations.

    Attributes:
        vocab_size: number of tokens, those added to the vocabulary included.
        bos_token_id: the token that begins a text, if the model has one.
        eos_token_ids: the tokens that end an answer.
        token_bytes: what each token adds to a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None,
        bos_token_id: int | None,
        eos_token_ids: frozenset[int],
        special_tokens: SpecialTokens = "text",
        tools_template: ChatTemplate | None = None,
        names: dict[str, str] | None = None,
    ) -> None:
        # Some files carry the settings of the training run; a prompt is never cut or padded here.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.token_bytes = TokenBytes(backend)
        if (largest := self.token_bytes.largest_id) >= _MOST_IDS:
            raise ModelLoadError(
                f"{TOKENIZER_FILE}: token {backend.id_to_token(largest)!r} has the id {largest}; "
                f"ids must be below {_MOST_IDS}"
            )
        self._encoder = Encoder(backend)
        self._names = names or {}
        self._chat_template = chat_template
        self._tools_template = tools_template or chat_template
        self._literals = Literals(backend) if special_tokens == "text" else None
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self._tables: dict[frozenset[int], list[bytes]] = {}
        self._pieces: dict[frozenset[int], PieceTable] = {}

    @classmethod
    def from_dir(
        cls,
        path: Path,
        special_tokens: SpecialTokens = "text",
        chat_template: Path | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> Tokenizer:
        """Load the tokenizer of a Hugging Face model directory.

        Args:
            path: the directory.
            special_tokens: how to treat special tokens that messages spell out, see
                `RouterSettings.special_tokens_in_messages`.
            chat_template: a file of a template to use in place of the model's.
            eos_token_ids: the tokens that end an answer, see `ModelConfig`.

        Raises:
            ModelLoadError: a file is missing or corrupt; the message says which and what to do.
        """
        backend, config, names = load_tokenizer(path)
        bos = backend.token_to_id(names.get("bos_token", ""))
        ends = frozenset(eos_token_ids)
        if chat_template is not None:
            chosen = read_template(chat_template, names)
            return cls(backend, chosen, bos, ends, special_tokens, names=names)
        sources = _chat_template_sources(path, config)
        template, tools = (ChatTemplate(source, names) if source else None for source in sources)
        return cls(backend, template, bos, ends, special_tokens, tools, names)

    def table_with(self, visible: Collection[int]) -> list[bytes] | None:
        """Return `TokenBytes.text_table` with the texts of some special tokens, which it lacks."""
        key, table = self.token_bytes.special.intersection(visible), self.token_bytes.text_table
        if not key or table is None:
            return table
        if (named := self._tables.get(key)) is None:
            named = self.token_bytes.with_names(table, key)
            self._tables = _with_newest(self._tables, key, named)
        return named

    @cached_property
    def piece_table(self) -> PieceTable | None:
        """What each token of a SentencePiece-like vocabulary adds to a text, special ones too."""
        return piece_table(self._backend)

    def pieces_with(self, visible: Collection[int]) -> PieceTable | None:
        """Return `piece_table` without special tokens, except for some."""
        if self.piece_table is None:
            return None
        key = self.token_bytes.special - frozenset(visible)
        if (pieces := self._pieces.get(key)) is None:
            pieces = self.piece_table.without(key)
            self._pieces = _with_newest(self._pieces, key, pieces)
        return pieces

    def with_template(self, source: str) -> Tokenizer:
        """Return a tokenizer that renders conversations by the template of a request.

        Raises:
            InvalidRequestError: the template is not valid Jinja.
        """
        other = copy.copy(self)
        other._chat_template = other._tools_template = RequestTemplate(source, self._names)
        return other

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation becomes a prompt."""
        return self._chat_template is not None

    @property
    def template_source(self) -> str | None:
        """The source of the chat template: of the one for chats with tools, if it is another."""
        return None if self._tools_template is None else self._tools_template.source

    def fit_chats(self, fit_for: Callable[[str], TemplateFix | None]) -> None:
        """Adapt conversations to what the chat template can show, before it renders them.

        Args:
            fit_for: returns the function that adapts them, for a template's source.
        """
        for template in (self._chat_template, self._tools_template):
            if template is not None:
                template.fit = fit_for(template.source)

    def marker_token_id(self, text: str) -> int | None:
        """Return the id of a token that grammars know by its id alone; None for any other text.

        For llguidance these are special tokens, and added ones such as Qwen's `<tool_call>`.
        """
        token_id: int | None = self._backend.token_to_id(text)
        if token_id is None or not self.token_bytes.is_added(token_id):
            return None
        is_tag = text.startswith("<") and text.endswith(">")
        return token_id if is_tag or self.token_bytes.is_special(token_id) else None

    @cached_property
    def markers(self) -> Markers:
        """The tokens that grammars know by their ids alone, see `marker_token_id`."""
        added = self._backend.get_added_tokens_decoder().values()
        ids = {token.content: self.marker_token_id(token.content) for token in added}
        return Markers({text: token_id for text, token_id in ids.items() if token_id is not None})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, optionally with the tokenizer's special tokens."""
        return self._encoder.encode(text, add_special_tokens)

    @property
    def special_ends(self) -> tuple[list[int], list[int]]:
        """The special tokens that begin and end a text, as `encode` adds them."""
        return self._encoder.special_ends

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a text that stands alone, without special tokens."""
        return self.encode(text, add_special_tokens=False)

    def check_ids(self, ids: Sequence[int], vocab_size: int, name: str) -> None:
        """Check that the model has all tokens of a text, which index its embedding.

        A tokenizer may have more: tokens that were added without a row in the weights.

        Args:
            ids: the text's tokens.
            vocab_size: the model's; its token ids are below it.
            name: the field that has the text, perhaps with an index: `prompts[1]`.

        Raises:
            InvalidRequestError: it lacks one; names the token and the field.
        """
        if self.token_bytes.largest_id < vocab_size:
            return
        largest = max(ids, default=0)
        if largest >= vocab_size:
            raise InvalidRequestError(
                f"{name}: the text has the token {self._backend.id_to_token(largest)!r} (id "
                f"{largest}), which the model lacks: its token ids are below {vocab_size}",
                name.partition("[")[0],
            )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD; unknown ids are left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str | None]:
        """Tokens as the vocabulary writes them; None for ids without a token."""
        name = self._backend.id_to_token
        return [name(token_id) for token_id in ids]

    def render_chat(self, messages: list[dict[str, Any]], options: ChatOptions = NO_OPTIONS) -> str:
        """The prompt text of a conversation, by the model's chat template.

        Raises:
            InvalidRequestError: the model has no chat template, or the template refuses.
        """
        template = self._tools_template if options.tools is not None else self._chat_template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions instead", param="messages"
            )
        return template.render(messages, options)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        options: ChatOptions = NO_OPTIONS,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: the conversation.
            options: the template's further input.
            add_special_tokens: add the tokenizer's special tokens, in addition to the template's.

        Raises:
            InvalidRequestError: the model has no chat template, or the template refuses, or a
                special token that a message or a tool spells out cannot be kept as text.
        """
        if add_special_tokens:
            begin, end = self.special_ends
            return [*begin, *self.encode_chat(messages, options), *end]
        given = {"messages": messages, "tools": options.tools, "variables": options.variables}
        if self._literals is None or not self._literals.are_in(given):
            text = self.render_chat(messages, options)
            return self.encode(text, add_special_tokens=False)

        def render(chat: dict[str, Any]) -> str:
            marked = replace(options, tools=chat["tools"], variables=chat["variables"])
            return self.render_chat(chat["messages"], marked)

        return self._literals.encode(given, render)


def _with_newest(
    tables: dict[frozenset[int], _Table], key: frozenset[int], table: _Table
) -> dict[frozenset[int], _Table]:
    """Return tables with a further one; only the newest are kept."""
    return {**dict(list(tables.items())[1 - _MOST_TABLES :]), key: table}


def _chat_template_sources(path: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The Jinja sources: of the chat template, and of another one for chats with tools, if any.

    They are files of their own, or in the tokenizer's configuration, perhaps by name.
    """
    file = path / "chat_template.jinja"
    tools_file = _read_source(path / "additional_chat_templates" / "tool_use.jinja")
    if file.is_file():
        return _read_source(file), tools_file
    template = config.get("chat_template")
    if template is None:  # a model that also takes images may have it in its processor's file
        template = read_optional_json(path / "chat_template.json").get("chat_template")
    named: dict[Any, Any] = template if isinstance(template, dict) else {"default": template}
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    sources = (named.get(name) for name in ("default", "tool_use"))
    default, tools = (source if isinstance(source, str) else None for source in sources)
    return default, tools_file or tools


def _read_source(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{file} cannot be read ({exc}): fetch the model again") from exc
