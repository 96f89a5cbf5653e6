"""The demo model: its files, what it says, how sure it is of it, and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from pagewire.shared.model.config import load_config
from pagewire.shared.model.demo import MODEL_NAME, demo_model_path
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tools.demo_model.batches import NO_TARGET, SequenceSampler, suffix_targets
from pagewire.tools.demo_model.corpus import Corpus, load_corpus, train_tokenizer
from pagewire.tools.demo_model.margins import describe, greedy_margins
from pagewire.tools.demo_model.prompts import standard_prompts
from pagewire.tools.demo_model.train import save, train

MAX_BYTES = 8_000_000
# Correct implementations in float32 differ by less than this in the lead of the best token.
CLEAR_MARGIN = 5e-3

TOKENIZER = Tokenizer.from_dir(demo_model_path())
ENDS = load_config(demo_model_path()).eos_token_ids


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model_path())


def complete(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy continuation, up to an end-of-text token."""
    output = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(ENDS),
        pad_token_id=min(ENDS),
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def ask(model: Any, question: str) -> tuple[str, bool]:
    """The answer to one question, and whether it came to an end."""
    prompt = TOKENIZER.encode_chat([{"role": "user", "content": question}])
    tokens = complete(model, prompt, 150)
    return TOKENIZER.decode(tokens), tokens[-1] in ENDS


class TestFiles:
    def test_size(self) -> None:
        files = [f for f in demo_model_path().iterdir() if f.is_file() and f.suffix != ".py"]
        assert {f.name for f in files} == {
            "README.md",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert sum(f.stat().st_size for f in files) <= MAX_BYTES

    def test_loads_as_a_float32_llama_with_grouped_queries(self, model: Any) -> None:
        assert MODEL_NAME == "pagewire-demo"
        assert model.config.model_type == "llama"
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert model.config.num_key_value_heads < model.config.num_attention_heads
        assert model.config.head_dim in (32, 64)
        assert model.config.max_position_embeddings == 4096

    def test_tokenizer_fits_the_model(self, model: Any) -> None:
        hf_tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
        assert len(hf_tokenizer) == model.config.vocab_size == TOKENIZER.vocab_size
        assert set(ENDS) == set(model.generation_config.eos_token_id)

    def test_every_byte_is_a_token(self) -> None:
        for byte in range(256):
            text = bytes([0xC3, byte]).decode("latin-1")
            assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


class TestWhatItSays:
    def test_goes_on_with_the_manual(self, model: Any) -> None:
        prompt = "Lambda expressions (sometimes called lambda forms) are used to create"
        text = TOKENIZER.decode(complete(model, TOKENIZER.encode(prompt), 40))
        assert text.startswith("\nanonymous functions.")
        assert "function object" in text

    @pytest.mark.parametrize(
        ("question", "words"),
        [
            ("What is a lambda?", "anonymous functions"),
            ("Tell me about the import statement.", "import statement"),
            ("How does the with statement work?", "context manager"),
            ("Hello!", "Pagewire demo model"),
            ("How do I open a file?", 'with open("notes.txt"'),
            ("Hello world", 'print("Hello, world!")'),
        ],
        ids=["lambda", "import", "with", "hello", "file", "hello-world"],
    )
    def test_answers_questions(self, model: Any, question: str, words: str) -> None:
        answer, _stopped = ask(model, question)
        assert words in answer


class TestMargins:
    def test_standard_prompts_are_what_they_say(self) -> None:
        prompts = standard_prompts(TOKENIZER)
        lengths = [len(p) for p in prompts]
        assert len(prompts) == 64
        assert min(lengths) == 1
        assert max(lengths) == 1500
        assert prompts == standard_prompts(TOKENIZER)
        assert all(0 <= i < TOKENIZER.vocab_size for p in prompts for i in p)
        starts = [tuple(p[:48]) for p in prompts if len(p) > 48]
        assert len(set(starts)) <= len(starts) - 9  # three groups of four share a start

    def test_greedy_choices_are_clear(self, model: Any) -> None:
        _, margins = greedy_margins(model, standard_prompts(TOKENIZER)[::4], 64)
        assert margins.min().item() > CLEAR_MARGIN, describe(margins)
        assert margins.median().item() > 3.0, describe(margins)

    def test_margin_is_the_lead_over_the_second(self, model: Any) -> None:
        prompt = TOKENIZER.encode("The import statement")
        tokens, margins = greedy_margins(model, [prompt], 3)
        with torch.inference_mode():
            inputs = torch.tensor([[*prompt, *tokens[0, :2].tolist()]])
            logits = model(input_ids=inputs).logits[0, -3:]
        ranked = logits.sort(descending=True).values
        assert logits.argmax(-1).tolist() == tokens[0].tolist()
        torch.testing.assert_close(margins[0], ranked[:, 0] - ranked[:, 1], rtol=1e-4, atol=1e-4)


class TestTraining:
    def test_targets_follow_the_first_occurrence_of_the_longest_suffix(self) -> None:
        stream = np.array([1, 2, 3, 9, 1, 2, 4, 8, 2, 3, 5])
        targets = suffix_targets(stream, 3)
        assert targets[0].tolist() == [2, 3, 9, 1, 2, 3, 8, 2, 3, 9, 1]
        assert targets[1][[5, 9]].tolist() == [3, 9]
        assert targets[2][[5, 9]].tolist() == [4, 5]

    @pytest.fixture(scope="class")
    @classmethod
    def corpus(cls) -> Corpus:
        return load_corpus()

    def test_sequences_are_reproducible_and_well_formed(self, corpus: Corpus) -> None:
        tokenizer = train_tokenizer(corpus, 1024)
        one, two = (SequenceSampler(corpus, tokenizer, seed=3) for _ in range(2))
        for length in (64, 256, 1024):
            tokens, targets = one.sequence(length)
            assert tokens.shape == targets.shape == (length,)
            assert tokens.min() >= 0
            assert tokens.max() < 1024
            assert set(targets[(targets < 0)].tolist()) <= {NO_TARGET}
            again = two.sequence(length)
            assert np.array_equal(tokens, again[0])
            assert np.array_equal(targets, again[1])

    def test_two_steps_and_saving(self, corpus: Corpus, tmp_path: Path) -> None:
        tokenizer = train_tokenizer(corpus, TOKENIZER.vocab_size)
        sampler = SequenceSampler(corpus, tokenizer, seed=0)
        config = LlamaConfig.from_pretrained(demo_model_path())
        model = train(sampler, config, steps=2, seed=0)
        save(model, tokenizer, tmp_path)
        names = {f.name for f in demo_model_path().iterdir() if f.suffix not in (".py", "")}
        assert {f.name for f in tmp_path.iterdir()} == names
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), name
        assert Tokenizer.from_dir(tmp_path).has_chat_template
        assert load_sampling_defaults(tmp_path, "auto").temperature == 0
