"""lm-eval's `local-completions` against a cluster: its scores are those of Hugging Face.

    pip install -e '.[clients]'
    pytest tests/clients
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster
from pagewire.tests.support.logprob_truth import LogprobTruth

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

TOLERANCE = 1e-3
SENTENCE = "The with statement is used to wrap the execution of a block."
DOCUMENTS: list[dict[str, Any]] = [
    {"text": SENTENCE, "ends": [" It is", " 東京 🌍", " café"], "right": 0},
    {"text": "Lambda expressions", "ends": [" (sometimes called", " are\n\n\tnot"], "right": 0},
    {"text": SENTENCE * 9, "ends": ["", " The", " <|end|>"], "right": 1},
    {"text": "è una lambda", "ends": [" or", "\n"], "right": 1},
]
# Few tokens, many, and more than lm-eval sends at once.
TASKS = {
    "ends": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{ends}}"
doc_to_target: "{{right}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
    "goes_on": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{ends[right]}}"
generation_kwargs: {until: ["\\n\\n", "it"], max_gen_toks: 40, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
