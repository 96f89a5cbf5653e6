"""Several answers to one prompt over the cluster: one prefill, one transfer, the same answers."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.answers import SEEDS, complete, each_alone
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters

pytestmark = pytest.mark.timeout(240)

TOKENIZER = Tokenizer.from_dir(demo_model_path())
TEXT = "The with statement is used to wrap the execution of a block. "
PREFILL_WORKERS = {"prefill-and-decode": 1, "aggregated": 0}


@pytest.fixture(scope="module", params=PREFILL_WORKERS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cluster(layout: str, shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=PREFILL_WORKERS[layout], decode=2)


def total(cluster: LocalCluster, name: str, **labels: str) -> float:
    """A metric's sum over workers."""
    return sum(
        value
        for sample, value in cluster.metrics().items()
        if re.match(rf"pagewire_{name}_total\b", sample)
        and all(f'{label}="{wanted}"' in sample for label, wanted in labels.items())
    )


def costs(cluster: LocalCluster) -> tuple[float, float]:
    """Prompt tokens that were computed, and KV bytes that crossed."""
    cluster.wait_idle(len(cluster.used_blocks()))
    crossed = total(cluster, "kv_transfer_bytes", direction="received")
    return total(cluster, "prompt_tokens_computed"), crossed


@pytest.mark.parametrize("repeats", [1, 6, 60], ids=["short", "middle", "long"])
def test_answers_are_those_of_single_requests_and_cost_one_prompt(
    cluster: LocalCluster, layout: str, repeats: int
) -> None:
    prompt = TOKENIZER.encode(TEXT * repeats)
    before = costs(cluster)
    alone = each_alone(cluster, prompt)
    after = costs(cluster)
    tokens, crossed = (end - start for start, end in zip(before, after, strict=True))
    assert tokens == 4 * len(prompt)
    together = [choice["token_ids"] for choice in complete(cluster, prompt, n=4)]
    assert together == alone
    assert len({tuple(answer) for answer in alone}) == 4
    now = costs(cluster)
    # Each further answer runs the prompt's last token again.
    assert now[0] - after[0] == len(prompt) + 3
    assert now[1] - after[1] == crossed / 4
    assert bool(crossed) == (layout == "prefill-and-decode" and repeats > 1)


def test_answers_and_their_prompt_have_log_probabilities(cluster: LocalCluster) -> None:
    prompt = TOKENIZER.encode(TEXT * 6)
    asked = {"logprobs": 2, "echo": True}
    alone = [complete(cluster, prompt, seed=seed, **asked)[0] for seed in SEEDS]
    before = costs(cluster)
    together = complete(cluster, prompt, n=4, **asked)
    assert costs(cluster)[0] - before[0] == len(prompt) + 3
    for one, other in zip(alone, together, strict=True):
        assert one["token_ids"] == other["token_ids"]
        left, right = one["logprobs"], other["logprobs"]
        assert left["tokens"] == right["tokens"]
        near = pytest.approx(left["token_logprobs"][1:], abs=1e-4)
        assert right["token_logprobs"][1:] == near


def test_stop_string_ends_one_answer_and_not_the_others(cluster: LocalCluster) -> None:
    prompt = TOKENIZER.encode(TEXT * 6)
    whole = complete(cluster, prompt, n=4, max_tokens=200)
    text = whole[1]["text"]
    stop = next(
        text[start : start + 6]
        for start in range(4, len(text))
        if all(
            text[start : start + 6] not in other["text"] for other in whole if other is not whole[1]
        )
    )
    choices = complete(cluster, prompt, n=4, max_tokens=200, stop=stop)
    assert [each["finish_reason"] for each in choices] == ["length", "stop", "length", "length"]
    assert choices[1]["text"] == text[: text.index(stop)]
    assert [choices[i]["text"] for i in (0, 2, 3)] == [whole[i]["text"] for i in (0, 2, 3)]


def test_answers_whose_worker_dies_go_on_as_requests_of_their_own(cluster: LocalCluster) -> None:
    prompt = TOKENIZER.encode(TEXT * 6)
    alone = each_alone(cluster, prompt, max_tokens=400)
    before = cluster.total("pagewire_request_migrations_total")
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(complete, cluster, prompt, n=4, max_tokens=400)
        deadline = time.monotonic() + 20
        while not (used := busy_decodes(cluster)):
            assert time.monotonic() < deadline
        os.kill(cluster.worker_pid(used[0]), signal.SIGKILL)
        together = [choice["token_ids"] for choice in answered.result()]
    assert together == alone
    assert cluster.total("pagewire_request_migrations_total") - before == 4


def busy_decodes(cluster: LocalCluster) -> list[str]:
    used = cluster.used_blocks()
    return [name for name, blocks in used.items() if name.startswith("decode-") and blocks]
