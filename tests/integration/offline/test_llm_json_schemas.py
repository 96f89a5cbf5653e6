"""Many JSON schemas: nearly all are accepted, end in time, and let nothing wrong through.

python -P -m pytest -s tests/integration/offline/test_llm_json_schemas.py    prints the figures
"""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from pagewire import LLM, SamplingParams, StructuredOutputs
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.structures import grammar_text
from pagewire.tests.support.json_schemas import SchemaMaker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_schemas(count: int) -> None:
    llm = LLM("demo", device="cpu", max_num_seqs=128, max_model_len=600)
    maker = SchemaMaker(seed=19)
    prompts, params, schemas, refused = [], [], [], []
    for index in range(count):
        schema = maker.make()
        Draft202012Validator.check_schema(schema)
        asked = StructuredOutputs(json=schema)
        try:
            llm.core.constraints.check_text(grammar_text(asked) or "", "json")
        except InvalidRequestError as exc:
            refused.append(exc.message)
            continue
        schemas.append(schema)
        prompts.append("A JSON object:\n")
        params.append(
            SamplingParams(
                temperature=0.0 if index % 2 else 0.8,
                seed=index,
                max_tokens=512,
                structured_outputs=asked,
            )
        )
    assert len(refused) <= 0.03 * count, refused
    outputs = llm.generate(prompts, params)
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.finish_reason == "stop":
            ended += 1
            Draft202012Validator(schema).validate(json.loads(output.text))
    tokens = sorted(len(output.token_ids) for output in outputs)
    print(
        f"{count} schemas: {len(refused)} refused, {ended} of {len(outputs)} ended by stop, median "
        f"{tokens[len(tokens) // 2]} tokens, {llm.core.stats}"
    )
    assert ended >= 0.95 * len(outputs)
