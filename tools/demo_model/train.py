"""Trains the demo model from scratch: `python -P -m pagewire.tools.demo_model.train --out DIR`.

The model is overfitted on purpose: it is to write recognisable English with greedy choices so
clear that tests can compare tokens exactly. `corpus.py` and `batches.py` say what it learns from.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer as PagewireTokenizer
from pagewire.tools.demo_model.batches import NO_TARGET, SequenceSampler
from pagewire.tools.demo_model.corpus import BOS, END, EOS, load_corpus, train_tokenizer
from pagewire.tools.demo_model.margins import describe, greedy, greedy_margins
from pagewire.tools.demo_model.prompts import standard_prompts

VOCAB_SIZE = 2048
TOKENS_PER_STEP = 2048
PEAK_LR = 4e-3
WARMUP_STEPS = 40
LONG_EVERY = 5  # each fifth step has long sequences
SHARPEN_FROM = 0.6  # share of the steps after which the model also learns from itself,
SHARPEN_EVERY = 6  # each sixth step,
MAX_OWN_PROMPT = 1200
SHARPEN_TOKENS = 96  # on this many tokens that it has generated
COPIED_FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "README.md",
    "tokenizer_config.json",
)


def make_optimizers(model: LlamaForCausalLM, steps: int) -> list[torch.optim.lr_scheduler.LambdaLR]:
    """Muon for the layers' matrices and AdamW for the rest, with one schedule."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)

    def schedule(step: int) -> float:
        return min((step + 1) / WARMUP_STEPS, max(0.0, 1.0 - step / steps))

    return [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in (muon, adamw)]


def batch_length(step: int) -> int:
    """Sequence length of a step: mostly short, for speed; some long, for far positions."""
    if step % LONG_EVERY:
        return 256
    return 2048 if step % (4 * LONG_EVERY) == 0 else 1024


def drawn_batch(sampler: SequenceSampler, length: int) -> tuple[Tensor, Tensor]:
    """Sequences of `length` tokens: tokens and targets, both [batch, length]."""
    rows = [sampler.sequence(length) for _ in range(TOKENS_PER_STEP // length)]
    tokens, targets = (np.stack(column) for column in zip(*rows, strict=True))
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def own_batch(model: LlamaForCausalLM, sampler: SequenceSampler) -> tuple[Tensor, Tensor]:
    """The model's own continuations, as its targets: what it would say anyhow, it says more surely.

    They begin with prompts of all kinds, so the margins grow where no text is learned by heart.
    """
    length = sampler.prompt_length(MAX_OWN_PROMPT)
    rows = min(16, max(2, TOKENS_PER_STEP // (length + SHARPEN_TOKENS)))
    drawn = [sampler.prompt(length) for _ in range(rows)]
    columns = zip(*drawn, strict=True)
    prompts, known = (torch.from_numpy(np.stack(column)).to(model.device) for column in columns)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The operations are too small to be shared out.
    own, _ = greedy(model, prompts, SHARPEN_TOKENS)
    torch.set_num_threads(threads)
    nothing = torch.full((rows, 1), NO_TARGET, device=model.device)
    return torch.cat([prompts, own], dim=1), torch.cat([known[:, :-1], own, nothing], dim=1)


def train(
    sampler: SequenceSampler, config: LlamaConfig, steps: int, seed: int, device: str = "cpu"
) -> LlamaForCausalLM:
    """Train a model and print the loss on the way."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(device)
    schedules = make_optimizers(model, steps)
    started, recent = time.monotonic(), []
    for step in range(steps):
        if step > SHARPEN_FROM * steps and step % SHARPEN_EVERY == 0:
            tokens, targets = own_batch(model, sampler)
        else:
            drawn = drawn_batch(sampler, batch_length(step))
            tokens, targets = (batch.to(device) for batch in drawn)
        logits = model(input_ids=tokens, use_cache=False).logits  # [batch, length, vocab]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            minutes = (time.monotonic() - started) / 60
            mean = sum(recent) / len(recent)
            print(f"step {step + 1}/{steps}  loss {mean:.4f}  {minutes:.1f} min", flush=True)
            recent.clear()
    return model.eval()


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write everything that a Hugging Face model directory has."""
    # The sampling defaults are greedy: off its greedy path the model says nothing of use.
    copied = {name: (demo_model_path() / name).read_bytes() for name in COPIED_FILES}
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    for name, content in copied.items():
        (out / name).write_bytes(content)


def main() -> None:
    """Train and save, as the command line says."""
    parser = argparse.ArgumentParser(description="Train the demo model from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, which is quicker")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True, warn_only=arguments.device != "cpu")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # asked for on a GPU by the line above
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus, VOCAB_SIZE)
    sampler = SequenceSampler(corpus, tokenizer, arguments.seed)
    ids = {text: tokenizer.token_to_id(text) for text in (BOS, EOS, END)}
    config = LlamaConfig.from_pretrained(
        demo_model_path(),
        vocab_size=VOCAB_SIZE,
        bos_token_id=ids[BOS],
        eos_token_id=[ids[EOS], ids[END]],
    )
    model = train(sampler, config, arguments.steps, arguments.seed, arguments.device).cpu()
    save(model, tokenizer, arguments.out)
    torch.set_num_threads(1)  # as in own_batch
    prompts = standard_prompts(PagewireTokenizer.from_dir(arguments.out))
    _, margins = greedy_margins(model, prompts, new_tokens=64)
    print(f"margins: {describe(margins)}")


if __name__ == "__main__":
    main()
