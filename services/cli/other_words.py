"""Advises users who type commands and options of vLLM, SGLang, Ollama and llama.cpp."""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Names of commands, and what to do instead; {model} is the model that was named, if one was.
_COMMANDS = (
    ("serve start server launch_server launch-server", "type `pagewire up --model {model}`"),
    ("run", "type `pagewire up --model {model}`, and in another terminal `pagewire chat`"),
    ("pull download", "`pagewire up --model {model}` fetches a model when it first needs it"),
    ("list ls models", "a cluster has one model, which `pagewire status` shows"),
    ("ps", "type `pagewire status`"),
    ("stop", "press Ctrl-C where `pagewire up` runs, or send it SIGTERM"),
    ("show info", "type `pagewire estimate --model {model}`"),
    ("rm delete", "models from the hub are in its own cache: type `hf cache`"),
    ("run-batch", "type `pagewire batch`"),
    ("cli client", "type `pagewire chat`"),
    ("create push cp", "a model is a directory in Hugging Face's form: `pagewire up --model DIR`"),
)

_NO_PARALLEL = (
    "GPUs share each layer of a model (--tensor-parallel-size N), or share requests as more "
    "workers (--prefill N and --decode N)"
)
_ALWAYS = "this is always on: leave it out"
_NO_DRAFTS = "there is no speculative decoding"
_NO_ADAPTERS = "there are no LoRA adapters: merge them into the weights"
_NO_OFFLOAD = "weights and KV cache stay on the GPU: there is no offloading"
_NO_IMAGES = "images, audio and video are not supported"

# Names of options, and what to use instead.
_OPTIONS = (
    ("--tp-size --tp -tp", "use --tensor-parallel-size"),
    ("--pipeline-parallel-size --pp-size --pp -pp", _NO_PARALLEL),
    ("--enable-expert-parallel --ep-size --ep --split-mode --tensor-split", _NO_PARALLEL),
    ("--data-parallel-size --dp-size --dp -dp", "use --decode N for N decode workers"),
    (
        "-q --load-in-4bit --load-in-8bit",
        "use --quantization, or a checkpoint that is quantised",
    ),
    ("--cache-type-k --cache-type-v", "use --kv-cache-dtype"),
    ("--enable-lora --lora-modules --lora-paths --lora --max-loras --max-lora-rank", _NO_ADAPTERS),
    ("--speculative-config --speculative-model --num-speculative-tokens", _NO_DRAFTS),
    ("--speculative-algorithm --speculative-draft-model-path --model-draft -md", _NO_DRAFTS),
    ("--swap-space --cpu-offload-gb --enable-hierarchical-cache", _NO_OFFLOAD),
    ("--n-gpu-layers --gpu-layers -ngl", "all layers are on the GPU, see --device"),
    ("--limit-mm-per-prompt --enable-multimodal --mmproj", _NO_IMAGES),
    ("--enforce-eager --disable-cuda-graph", "use --no-cuda-graphs"),
    ("--model-path --model-id --hf-repo -hf -m", "use --model"),
    ("--tokenizer --tokenizer-path --tokenizer-mode", "the tokenizer is the model's own"),
    ("--alias", "use --served-model-name"),
    ("--max-seq-len --max-total-tokens --context-length", "use --max-model-len"),
    ("--ctx-size --num-ctx -c", "use --max-model-len"),
    ("--mem-fraction-static", "use --gpu-memory-utilization"),
    ("--max-running-requests --max-concurrent-requests --parallel -np", "use --max-num-seqs"),
    ("--chunked-prefill-size --max-prefill-tokens --ubatch-size", "use --max-num-batched-tokens"),
    ("--page-size", "use --block-size"),
    ("--disable-radix-cache --no-prefix-caching", "use --no-enable-prefix-caching"),
    ("--tool-call-parser", "use --tool-parser"),
    ("--enable-auto-tool-choice --jinja --enable-reasoning --enable-chunked-prefill", _ALWAYS),
    ("--flash-attn -fa --enable-metrics", _ALWAYS),
    ("--guided-decoding-backend --grammar-backend --structured-outputs-config", _ALWAYS),
    ("--attention-backend", "use --kernels"),
    ("--enable-deterministic-inference", "use --batch-invariant"),
    ("--chat-template-file", "use --chat-template"),
    ("--trust-remote-code", "code that a model brings along is not run: leave it out"),
    ("--api-key", "set PAGEWIRE_API_KEY, or use --api-key-file: other users see a command line"),
    ("--seed", "a request has its own seed: leave it out"),
    ("--allowed-origins", "use --cors-origins"),
    ("--uvicorn-log-level", "use --log-level"),
    ("--disable-log-requests --disable-log-stats --enable-log-requests", "see --log-level"),
    ("--kv-transfer-config --disaggregation-transfer-backend", "use --kv-transport"),
    ("--disaggregation-mode", "use the commands `pagewire prefill` and `pagewire decode`"),
    ("--threads -t", "set OMP_NUM_THREADS"),
    ("--download-dir", "set HF_HOME"),
    ("--hf-token", "set HF_TOKEN"),
    ("--rope-scaling --hf-overrides --json-model-override-args", "edit the model's config.json"),
)

COMMANDS = {name: advice for names, advice in _COMMANDS for name in names.split()}
OPTIONS = {name: advice for names, advice in _OPTIONS for name in names.split()}


def advice_for_command(args: Sequence[str]) -> str | None:
    """Return what to type in place of another program's command line; None if it is unknown."""
    name = args[0] if args else ""
    if name not in COMMANDS:
        return None
    model = next((word for word in args[1:] if not word.startswith("-")), "MODEL")
    return f"there is no command {name}: {COMMANDS[name].format(model=model)}"


def advice_for_option(args: Sequence[str], known: Collection[str]) -> str | None:
    """Return what to use in place of another program's option; None if there is none such.

    Args:
        args: the arguments of a command.
        known: the command's own options.
    """
    for word in args:
        name = word.partition("=")[0]
        if name in OPTIONS and name not in known:
            return f"there is no option {name}: {OPTIONS[name]}"
    return None
