"""The examples of the OpenAPI document work on a cluster as they are."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=1, decode=1, predicted=True)


def example(operation: dict[str, Any]) -> Any:
    """The example of a request's body, or None if there is no body."""
    body = operation.get("requestBody")
    return None if body is None else body["content"]["application/json"]["example"]


def test_each_operation_is_answered_when_sent_as_documented(cluster: LocalCluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as http:
        paths = http.get("/openapi.json").json()["paths"]
        links = paths["/v1/responses"]["post"]["responses"]["200"]["links"]
        sent = set()
        for path, operations in paths.items():
            for method, operation in operations.items():
                if operation["operationId"] in links:
                    continue
                for each in operation["parameters"]:
                    if each["in"] == "path":
                        path = path.replace(f"{{{each['name']}}}", each["example"])
                answer = http.request(method, path, json=example(operation))
                assert answer.status_code == 200, (method, path, answer.text)
                sent.add(operation["operationId"])
        assert len(sent) + len(links) == sum(map(len, paths.values()))


def test_operations_on_a_stored_response_take_the_id_from_its_link(cluster: LocalCluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as http:
        paths = http.get("/openapi.json").json()["paths"]
        create = paths["/v1/responses"]["post"]
        by_name = {
            operation["operationId"]: (method, path, operation)
            for path, operations in paths.items()
            for method, operation in operations.items()
        }
        for link in create["responses"]["200"]["links"].values():
            stored = http.post("/v1/responses", json=example(create)).json()
            assert link["parameters"] == {"response_id": "$response.body#/id"}
            method, path, operation = by_name[link["operationId"]]
            answer = http.request(method, path.replace("{response_id}", stored["id"]))
            # Only responses in the background can be cancelled, which there are not.
            expected = 200 if "200" in operation["responses"] else 400
            assert answer.status_code == expected, (method, path, answer.text)
