"""lm-eval against a cluster, by completions and chats: scores and answers are Hugging Face's."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.local_cluster import local_cluster

# The libraries' own warnings are not ours to mend.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

TOLERANCE = 1e-3
MAX_TOKENS, STOPS = 40, ["\n\n", "it"]
SENTENCE = "The with statement is used to wrap the execution of a block."
DOCUMENTS: list[dict[str, Any]] = [
    {"text": SENTENCE, "ends": [" It is", " 東京 🌍", " café"], "right": 0},
    {"text": "Lambda expressions", "ends": [" (sometimes called", " are\n\n\tnot"], "right": 0},
    {"text": SENTENCE * 9, "ends": [" The", " <|end|>"], "right": 0},
    {"text": "è una lambda", "ends": [" or", "\n"], "right": 1},
]
TASK = """
dataset_path: json
test_split: test
doc_to_text: "{{text}}"
target_delimiter: ""
"""
TASKS = {
    "ends": """
output_type: multiple_choice
doc_to_choice: "{{ends}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity}]
""",
    "goes_on": f"""
output_type: generate_until
doc_to_target: "{{{{ends[right]}}}}"
generation_kwargs: {{until: {json.dumps(STOPS)}, max_gen_toks: {MAX_TOKENS}, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""",
}


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The library, which asks nobody for models or data."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        warnings.simplefilter("ignore")
        import lm_eval
        import lm_eval.tasks

        yield lm_eval


@pytest.fixture(scope="module")
def tasks(lm_eval: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's own form of tasks, from files as its users write them."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    data = f"dataset_kwargs: {{data_files: {{test: {documents}}}}}\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{TASK}{text}")
    return lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)


def without_bos(folder: Path) -> Path:
    """Make a model whose tokenizer begins a text with no token, as those of Qwen do."""
    shutil.copytree(demo_model_path(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    return folder


@dataclass
class Served:
    """A cluster's model and how lm-eval is to send it prompts."""

    path: Path
    model_args: str
    url: str


@pytest.fixture(scope="module", params=["token ids", "texts"])
def served(
    request: pytest.FixtureRequest, lm_eval: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A tokenizer's own first token is only sent rightly as an id: a text would get another."""
    if request.param == "texts":
        path = without_bos(tmp_path_factory.mktemp("model") / "pagewire-demo")
        model, options = str(path), "tokenized_requests=False"
    else:
        path, model = demo_model_path(), "demo"
        options = "tokenized_requests=True,add_bos_token=True"
    workers = ("--prefill", "1", "--decode", "1", "--device", "cpu", "--dtype", "float32")
    with local_cluster("--model", model, *workers) as cluster:
        url = f"{cluster.url}/v1/completions"
        shared = f"model=pagewire-demo,base_url={url},tokenizer={path},max_retries=1"
        yield Served(path, f"{shared},{options}", cluster.url)


class Truth:
    """Scores and answers of Hugging Face's model."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def score(self, context: list[int], end: list[int]) -> tuple[float, bool]:
        """Return the end's log likelihood, and whether it is the most likely one."""
        rows = self._model(torch.tensor([context + end])).logits[0, len(context) - 1 : -1]
        chosen = torch.log_softmax(rows.float(), -1)[range(len(end)), end]
        return chosen.sum().item(), rows.argmax(-1).tolist() == end

    def end(self, text: str, end: str) -> tuple[float, bool]:
        """Score an end of a text."""
        context, whole = self._ids(text), self._ids(text + end)
        assert whole[: len(context)] == context
        return self.score(context, whole[len(context) :])

    def whole(self, text: str) -> float:
        """Score a text, whose first token comes after the model's first one."""
        return self.score([self._tokenizer.bos_token_id], self._ids(text))[0]

    def answers(self, text: str) -> str:
        """Return what greedily answers a chat's message."""
        chat = [{"role": "user", "content": text}]
        asked = {"add_generation_prompt": True, "return_dict": False}
        return self._generated(self._tokenizer.apply_chat_template(chat, **asked))

    def goes_on(self, text: str) -> str:
        """Return what greedily comes next, up to a stop string."""
        return self._generated(self._ids(text))

    @torch.inference_mode()
    def _generated(self, ids: list[int]) -> str:
        made = self._model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),  # else 0, which begins texts,
            max_new_tokens=MAX_TOKENS,  # is taken for padding
            do_sample=False,
            pad_token_id=0,
        )
        answer = self._tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)
        return min((answer.partition(stop)[0] for stop in STOPS), key=len)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text).input_ids


@pytest.mark.parametrize("batches", ["batch_size=1", "batch_size=64", "num_concurrent=4"])
def test_scores_and_answers_are_hugging_faces(
    lm_eval: Any, tasks: Any, served: Served, batches: str
) -> None:
    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"{served.model_args},{batches}",
        tasks=list(TASKS),
        task_manager=tasks,
        bootstrap_iters=0,
    )
    truth = Truth(served.path)
    found = {
        name: {each["doc_id"]: each["resps"] for each in samples}
        for name, samples in result["samples"].items()
    }
    for index, document in enumerate(DOCUMENTS):
        text = document["text"]
        for end, [(score, is_best)] in zip(document["ends"], found["ends"][index], strict=True):
            expected, expected_best = truth.end(text, end)
            assert score == pytest.approx(expected, abs=TOLERANCE), (text, end)
            assert is_best == expected_best
        assert found["whole"][index] == [[pytest.approx(truth.whole(text), abs=TOLERANCE)]]
        assert found["goes_on"][index] == [[truth.goes_on(text)]]
    assert result["results"]["ends"]["acc,none"] > 0


def test_answers_of_chats_are_hugging_faces(lm_eval: Any, tasks: Any, served: Served) -> None:
    url = f"{served.url}/v1/chat/completions"
    result = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args=f"model=pagewire-demo,base_url={url},max_retries=1,num_concurrent=2",
        tasks=["goes_on"],
        task_manager=tasks,
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    truth = Truth(served.path)
    found = {each["doc_id"]: each["resps"] for each in result["samples"]["goes_on"]}
    for index, document in enumerate(DOCUMENTS):
        assert found[index] == [[truth.answers(document["text"])]]
