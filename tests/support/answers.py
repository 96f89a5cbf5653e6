"""Asks a cluster for several answers to one prompt, or for each of these answers alone."""

from __future__ import annotations

import secrets
from typing import Any

import httpx

from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.local_cluster import LocalCluster

SEED = 11
SEEDS = [RequestSpec(seed=SEED).for_choice(choice).seed for choice in range(4)]


def body_of(prompt: list[int], **fields: Any) -> dict[str, Any]:
    """Return a request that finds nothing in a prefix cache."""
    return {
        "model": "pagewire-demo",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 2.0,
        "seed": SEED,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": secrets.token_hex(8),
        **fields,
    }


def complete(cluster: LocalCluster, prompt: list[int], **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a completion."""
    url = f"{cluster.url}/v1/completions"
    response = httpx.post(url, json=body_of(prompt, **fields), timeout=60)
    assert response.is_success, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def each_alone(cluster: LocalCluster, prompt: list[int], **fields: Any) -> list[list[int]]:
    """Return the tokens of four requests that have the seeds of one request's four answers."""
    choices = [complete(cluster, prompt, seed=seed, **fields)[0] for seed in SEEDS]
    return [choice["token_ids"] for choice in choices]
