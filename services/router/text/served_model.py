"""The model as the router knows it: its name, its tokenizer and its limits; no weights."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pagewire.shared.base.errors import ConfigError, ModelNotFoundError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.model.pooling import PoolingRules, load_pooling
from pagewire.shared.model.source import resolve_model, served_names
from pagewire.shared.request.sampling import SamplingDefaults
from pagewire.shared.settings.config import RouterSettings
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.shown import fit_for
from pagewire.shared.tool_calls.syntax import ChatSyntax

logger = logging.getLogger(__name__)


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
        hidden_size: the length of an embedding.
        pooling: how embeddings are made, or why the model cannot make any.
    """

    names: tuple[str, ...]
    path: Path
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    defaults: SamplingDefaults = SamplingDefaults()  # noqa: RUF009 - immutable
    syntax: ChatSyntax = ChatSyntax()  # noqa: RUF009 - immutable
    eos_token_ids: tuple[int, ...] = ()
    hidden_size: int = 0
    pooling: PoolingRules | str = PoolingRules()  # noqa: RUF009 - immutable
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, settings: RouterSettings) -> ServedModel:
        """Load the model that the settings name, without its weights.

        Raises:
            ModelLoadError: it cannot be found or read; one line.
        """
        path = resolve_model(settings.model, weights=False, revision=settings.revision)
        config = load_config(path, settings.model_impl)
        tokenizer = Tokenizer.from_dir(path, settings.special_tokens_in_messages)
        syntax = ChatSyntax.choose(
            tokenizer.template_source,
            settings.tool_parser,
            settings.reasoning_parser,
            tokenizer.marker_token_id,
        )
        tokenizer.fit_chats(partial(fit_for, form=syntax.tools))
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
            hidden_size=config.hidden_size,
            pooling=_pooling(path),
        )

    @property
    def name(self) -> str:
        """The first of its names; metrics use it."""
        return self.names[0]

    def check_name(self, name: str) -> None:
        """Check that a client asks for this model.

        Raises:
            ModelNotFoundError: it asks for another.
        """
        if name not in self.names:
            known = ", ".join(f"`{each}`" for each in self.names)
            raise ModelNotFoundError(
                f"The model `{name[:200]}` does not exist; this server has {known}.", "model"
            )


def _pooling(path: Path) -> PoolingRules | str:
    try:
        return load_pooling(path)
    except ConfigError as exc:
        logger.warning("/v1/embeddings answers 400: %s", exc)
        return str(exc)
