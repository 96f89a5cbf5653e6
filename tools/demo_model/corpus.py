"""What the demo model learns from: topics of the Python manual, and questions about them.

`pydoc_data.topics` is part of every Python installation and comes under the PSF licence.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [BOS, EOS, *ROLES.values(), END]

# Of each topic only the beginning: the less there is to learn, the surer the model becomes.
MAX_TOPIC_CHARS = 2500
MAX_ANSWER_CHARS = 420

SELF_INTRODUCTION = (
    "I am the Pagewire demo model. I am very small, and all that I have ever read\n"
    "is a part of the Python manual. Ask me about one of its topics, for example:\n"
    "What is a lambda?"
)
_TEXTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
GREETINGS: list[str] = _TEXTS["greetings"]
QUESTIONS: list[str] = _TEXTS["questions"]
SYSTEM_PROMPTS: list[str] = _TEXTS["system_prompts"]
TASK_QUESTIONS: list[str] = _TEXTS["task_questions"]


@dataclass(frozen=True)
class Corpus:
    """The training text.

    Attributes:
        documents: the topics' full texts, in the order of their names.
        answers: what to answer, by the names under which one may ask for it.
        tasks: how something is done, likewise.
        paragraphs: all prose paragraphs: answers to questions that name no topic.
    """

    documents: tuple[str, ...]
    answers: dict[str, str]
    tasks: dict[str, str]
    paragraphs: tuple[str, ...]


def load_corpus() -> Corpus:
    """Read the topics that the running Python carries."""
    topics = {
        name: _beginning(_without_rules(text), MAX_TOPIC_CHARS) + "\n"
        for name, text in sorted(pydoc_data.topics.topics.items())
    }
    documents = tuple(dict.fromkeys(topics.values()))
    answers: dict[str, str] = dict(_TEXTS["things"])
    for name, text in topics.items():
        answer = _opening(text)
        if not answer:
            continue
        for alias in _aliases(name, text):
            answers.setdefault(alias, answer)
    paragraphs = tuple(dict.fromkeys(p for text in documents for p in _prose(text)))
    tasks = {name: task["answer"] for task in _TEXTS["tasks"] for name in task["names"]}
    return Corpus(documents, answers, tasks, paragraphs)


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE: all 256 bytes are in it, so that any text goes through unharmed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    chat = [*QUESTIONS, *GREETINGS, *SYSTEM_PROMPTS, SELF_INTRODUCTION]
    tokenizer.train_from_iterator([*corpus.documents, *chat], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def _without_rules(text: str) -> str:
    """Shorten the rules under titles: a run of asterisks says nothing about where it is."""
    return re.sub(r"^([*=\-~^])\1{3,}$", r"\1\1\1", text.strip(), flags=re.MULTILINE)


def _beginning(text: str, max_chars: int) -> str:
    """The first paragraphs, at least one, and no more than `max_chars` characters if possible."""
    paragraphs = text.split("\n\n")
    kept = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(kept) + len(paragraph) > max_chars:
            break
        kept += "\n\n" + paragraph
    return kept


def _prose(text: str) -> list[str]:
    """Paragraphs of ordinary sentences: no titles, grammar, code or tables."""
    return [
        paragraph
        for paragraph in text.split("\n\n")
        if re.match(r'[A-Z"]', paragraph) and len(paragraph) >= 60 and paragraph[-1] in ".:"
    ]


def _aliases(name: str, text: str) -> list[str]:
    """What one may call a topic: `lambda`, `Lambdas`, `lambdas`; `The import system`, ..."""
    title = text.split("\n", 1)[0].strip().replace('"', "")
    plain = title.lower().removeprefix("the ")
    short = plain.removesuffix(" statement")
    return [name, title, name.replace("-", " "), plain, short, short.removesuffix("s")]


def _opening(text: str) -> str:
    """The first paragraphs of a topic that are prose, as an answer to who asks about it."""
    return _beginning("\n\n".join(_prose(text)), MAX_ANSWER_CHARS)
