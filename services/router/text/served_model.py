"""The model as the router knows it: its name, its tokenizer and its limits; no weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pagewire.shared.base.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    PagewireError,
)
from pagewire.shared.model.config import config_digest, load_config
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.model.pooling import PoolingRules, load_pooling
from pagewire.shared.model.source import resolve_model, served_names
from pagewire.shared.request.sampling import SamplingDefaults
from pagewire.shared.settings.config import RouterSettings
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.shared.tool_calls.template_fixes import template_fix_for

logger = logging.getLogger(__name__)


class UnboundedHereError(PagewireError):
    """A request must be read in a process whose CPU time is bounded."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of a cluster.

    Attributes:
        names: the names that clients may use for it, at least one.
        path: directory of its files.
        vocab_size: width of the logits; token ids are below it.
        max_model_len: longest prompt plus answer, in tokens; a worker may allow less.
        defaults: sampling parameters for requests that do not set them.
        syntax: how the model writes tool calls and reasoning.
        eos_token_ids: end-of-sequence tokens: any of them ends an answer.
        config_digest: hash of config.json; workers with another one get no requests.
        hidden_size: the length of an embedding.
        pooling: how embeddings are made, or why the model cannot make any.
        before_template: called before a request's own template is compiled; None: requests may
            have none.
    """

    names: tuple[str, ...]
    path: Path
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    defaults: SamplingDefaults = SamplingDefaults()  # noqa: RUF009 - immutable
    syntax: ChatSyntax = ChatSyntax()  # noqa: RUF009 - immutable
    eos_token_ids: tuple[int, ...] = ()
    config_digest: str = ""
    hidden_size: int = 0
    pooling: PoolingRules | str = PoolingRules()  # noqa: RUF009 - immutable
    before_template: Callable[[], None] | None = None
    trusts_placement: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, settings: RouterSettings) -> ServedModel:
        """Load the model that the settings name, without its weights.

        Raises:
            ModelLoadError: it cannot be found or read; one line.
        """
        path = resolve_model(settings.model, weights=False, revision=settings.revision)
        config = load_config(path, settings.model_impl)
        tokenizer = Tokenizer.from_dir(
            path,
            settings.special_tokens_in_messages,
            settings.chat_template,
            config.eos_token_ids,
        )
        syntax = ChatSyntax.choose(
            tokenizer.template_source,
            settings.tool_parser,
            settings.reasoning_parser,
            tokenizer.marker_token_id,
        )
        tokenizer.fit_chats(partial(template_fix_for, form=syntax.tools))
        # Made now: the first request must not wait for it.
        if tokenizer.table_with(syntax.tokens.values()) is None:
            tokenizer.pieces_with(syntax.tokens.values())
        return cls(
            names=served_names(settings.served_model_name, settings.model),
            path=path,
            tokenizer=tokenizer,
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
            defaults=load_sampling_defaults(path, settings.generation_config),
            syntax=syntax,
            eos_token_ids=config.eos_token_ids,
            config_digest=config_digest(path),
            hidden_size=config.hidden_size,
            pooling=_pooling(path),
            before_template=_not_here if settings.trust_request_chat_template else None,
            trusts_placement=settings.trust_request_placement,
        )

    @property
    def name(self) -> str:
        """The first of its names; metrics use it."""
        return self.names[0]

    def check_placement(self) -> None:
        """Check that requests may have their prompts computed by a prefill worker.

        Raises:
            InvalidRequestError: they may not.
        """
        if not self.trusts_placement:
            raise InvalidRequestError(
                "use_prefill_worker is not allowed unless the operator sets "
                "--trust-request-placement",
                "use_prefill_worker",
                "unsupported_parameter",
            )

    def tokenizer_with(self, chat_template: str | None) -> Tokenizer:
        """Return the tokenizer that renders a request's conversation.

        Args:
            chat_template: the request's template; None if it has none.

        Raises:
            InvalidRequestError: it may have none, or the template is not valid Jinja.
            UnboundedHereError: it must be rendered in a process whose CPU time is bounded.
        """
        if chat_template is None:
            return self.tokenizer
        if self.before_template is None:
            raise InvalidRequestError(
                "chat_template is not allowed unless the operator sets "
                "--trust-request-chat-template",
                "chat_template",
                "unsupported_parameter",
            )
        self.before_template()
        return self.tokenizer.with_template(chat_template)

    def check_name(self, name: str) -> None:
        """Check that a client asks for this model.

        Raises:
            ModelNotFoundError: it asks for another.
        """
        if name not in self.names:
            known = ", ".join(f"`{alias}`" for alias in self.names)
            raise ModelNotFoundError(
                f"The model `{name[:200]}` does not exist; this server has {known}.", "model"
            )


def _not_here() -> None:
    raise UnboundedHereError


def _pooling(path: Path) -> PoolingRules | str:
    try:
        return load_pooling(path)
    except ConfigError as exc:
        logger.warning("/v1/embeddings will refuse all requests with 400: %s", exc)
        return str(exc)
