"""The OpenAPI document of a router, and what it says of bodies and responses."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from pagewire.services.router.http.openapi.document import openapi_document

JSON = "application/json"
STREAM = "text/event-stream"


def document(needs_key: bool = False, model: str = "MODEL") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(openapi_document(needs_key, model))
    return found


class Document:
    """Validates values by the schemas of a document.

    Args:
        api: the document.
        is_strict: no object may have a field that its schema does not name.
    """

    def __init__(self, api: dict[str, Any], is_strict: bool = False) -> None:
        self.api = copy.deepcopy(api)
        if is_strict:
            for schema in self.api["components"]["schemas"].values():
                schema["additionalProperties"] = False
        resource = Resource.from_contents(self.api, default_specification=DRAFT202012)
        self._registry = Registry().with_resource("urn:api", resource)

    def validator(self, schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
        absolute = json.loads(json.dumps(schema).replace('"#/', '"urn:api#/'))
        return jsonschema.Draft202012Validator(absolute, registry=self._registry)

    def check(self, schema: dict[str, Any], value: Any) -> None:
        self.validator(schema).validate(value)

    def response(self, method: str, path: str, status: int) -> dict[str, Any]:
        """Return the schemas of a response by media type."""
        found: dict[str, Any] = self.api["paths"][path][method]["responses"][str(status)]["content"]
        return found

    def body(self, path: str) -> dict[str, Any]:
        """Return the schema of a route's request body."""
        schema = self.api["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"]
        found: dict[str, Any] = self.api["components"]["schemas"][schema["$ref"].split("/")[-1]]
        return found
