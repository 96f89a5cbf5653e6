"""Client libraries and NVIDIA's load generator aiperf on a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel, Field

from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.live_router import MODEL
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster

# The libraries' own warnings are not ours to mend.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

MESSAGES: list[Any] = [{"role": "user", "content": "The with statement is used to wrap a block."}]


class Part(BaseModel):
    """What the answer is to be."""

    kind: Literal["list", "tuple", "set"]
    size: int = Field(ge=0, le=99)


class Kind(BaseModel):
    """Without numbers: Anthropic's client takes their bounds out of a schema."""

    kind: Literal["list", "tuple", "set"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    options = ("--device", "cpu", "--dtype", "float32", "--tool-parser", "hermes")
    with local_cluster("--prefill", "1", "--decode", "1", *options) as running:
        yield running


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_makes_objects(cluster: LocalCluster, mode: str) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        own = instructor.from_openai(client, mode=instructor.Mode[mode])
        asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_retries": 0}
        whole = own.create(**asked, response_model=Part, temperature=0)
        parts = list(own.create_partial(**asked, response_model=Part, temperature=0))
    assert isinstance(whole, Part)
    Part.model_validate(parts[-1].model_dump())  # asked with another schema: another answer


def test_anthropics_client_makes_objects(cluster: LocalCluster) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100}
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0) as client:
        found = client.messages.parse(**asked, output_format=Kind).parsed_output
    assert isinstance(found, Kind)


def _ask_litellm(cluster: LocalCluster, provider: str, **asked: Any) -> Any:
    """Return the message of an answer."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks GitHub
        warnings.simplefilter("ignore")
        import litellm

        answer = litellm.completion(
            model=f"{provider}/{MODEL}",
            api_base=cluster.url if provider == "anthropic" else f"{cluster.url}/v1",
            api_key="none",
            messages=MESSAGES,
            max_tokens=400,
            **asked,
        )
    return answer.choices[0].message


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_calls_tools(cluster: LocalCluster, provider: str) -> None:
    function = {"name": "make", "parameters": Part.model_json_schema()}
    tools = [{"type": "function", "function": function}]
    calls = _ask_litellm(cluster, provider, tools=tools, tool_choice="required").tool_calls
    assert calls
    for call in calls:
        assert call.function.name == "make"
        Part.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_makes_objects(cluster: LocalCluster, provider: str) -> None:
    Part.model_validate_json(_ask_litellm(cluster, provider, response_format=Part).content)


@pytest.mark.parametrize("endpoint", ["chat", "messages"])
def test_aiperf_measures(cluster: LocalCluster, endpoint: str, tmp_path: Path) -> None:
    command = [
        *(str(Path(sys.executable).with_name("aiperf")), "profile", "--ui", "none"),
        *("--model", MODEL, "--url", cluster.url, "--endpoint-type", endpoint, "--streaming"),
        *("--tokenizer", str(demo_model_path()), "--request-count", "12", "--concurrency", "4"),
        *("--synthetic-input-tokens-mean", "60", "--output-tokens-mean", "20"),
        *("--output-artifact-dir", str(tmp_path)),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["request_count"]["avg"] == 12
    assert "error_request_count" not in found or found["error_request_count"]["avg"] == 0
    assert found["output_sequence_length"]["avg"] == pytest.approx(20, abs=2)
    assert found["time_to_first_token"]["avg"] > 0
