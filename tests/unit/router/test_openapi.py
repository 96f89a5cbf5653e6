"""The OpenAPI document has each route and each field of a body, and no others."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from fastapi.routing import APIRoute

from pagewire.services.router.http.api.openai.schemas import ChatBody, CompletionBody
from pagewire.services.router.http.api.responses.bodies import ResponseBody
from pagewire.services.router.http.openapi.document import ROUTES
from pagewire.services.router.http.operation import Operation, operation_of
from pagewire.services.router.http.server.app import ROUTERS
from pagewire.services.router.http.unsupported import (
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_RESPONSES,
)
from pagewire.tests.support.api_document import document

API = document(needs_key=True)
SCHEMAS = API["components"]["schemas"]
OPERATIONS = {route.path: operation_of(route.openapi_extra) for route in ROUTES}
WITH_BODIES = {path: each for path, each in OPERATIONS.items() if each.body is not None}


def refs(schema: Any) -> set[str]:
    """All names that a part of the document refers to."""
    if isinstance(schema, list):
        return {name for each in schema for name in refs(each)}
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
    own |= set((schema.get("discriminator") or {}).get("mapping", {}).values())
    return own | {name for each in schema.values() for name in refs(each)}


def test_each_route_is_described_and_no_other() -> None:
    served = {
        (method.lower(), route.path_format)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and (route.include_in_schema and router.include_in_schema)
        for method in (route.methods or set()) - {"HEAD"}  # as GET, and so not described
    }
    described = {(method, path) for path, methods in API["paths"].items() for method in methods}
    assert described == served
    names = [
        operation["operationId"] for each in API["paths"].values() for operation in each.values()
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("operation", WITH_BODIES.values(), ids=WITH_BODIES)
def test_fields_are_those_that_the_body_is_decoded_into(operation: Operation) -> None:
    kind = operation.body
    assert kind is not None
    schema = SCHEMAS[kind.__name__]
    others = schema["properties"].keys() - set(kind.__struct_fields__)
    if kind is ResponseBody:
        assert others == REFUSED_IN_RESPONSES.keys() - set(kind.__struct_fields__)
        assert {*ChatBody.__struct_fields__} <= schema["properties"].keys()
    elif kind is CompletionBody:
        assert others == REFUSED_IN_COMPLETIONS.keys() - set(kind.__struct_fields__)
    else:
        assert others == operation.refused.keys() - set(kind.__struct_fields__)
    assert set(kind.__struct_fields__) <= schema["properties"].keys()


def test_all_schemas_are_valid_and_all_names_are_there() -> None:
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["description"], name
        assert "pagewire" not in name  # as msgspec names classes whose names are not unique
    assert refs(API) == {f"#/components/schemas/{name}" for name in SCHEMAS}
    text = json.dumps(API)
    assert "Attributes:" not in text
    assert r"\\A" not in text


def test_bounds_types_and_descriptions_come_from_the_code() -> None:
    chat = SCHEMAS["ChatBody"]
    assert chat["required"] == ["model", "messages"]
    assert chat["properties"]["messages"] == {
        "description": "The conversation. Must be a list of 1 to 4096 messages.",
        "type": "array",
        "items": {"$ref": "#/components/schemas/ChatMessage"},
        "minItems": 1,
        "maxItems": 4096,
    }
    assert chat["properties"]["n"]["anyOf"][0] | {"description": ""} == {
        "description": "",
        "type": "integer",
        "minimum": 1,
        "maximum": 128,
    }
    assert chat["properties"]["functions"]["enum"] == [None]
    assert SCHEMAS["CompletionBody"]["properties"]["best_of"]["enum"] == [None, 1]
    assert SCHEMAS["Function"]["properties"]["name"]["pattern"] == "^[A-Za-z0-9_.:-]{1,128}$"
    limit = API["paths"]["/v1/responses/{response_id}/input_items"]["get"]["parameters"][2]
    assert (limit["name"], limit["in"]) == ("limit", "query")
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}


def test_keys_and_the_forms_of_errors() -> None:
    assert API["security"] == [{"bearer": []}, {"x-api-key": []}]
    schemes = API["components"]["securitySchemes"]
    assert set(schemes) == {"bearer", "x-api-key"}
    assert API["paths"]["/health"]["get"]["security"] == []
    assert "401" not in API["paths"]["/health"]["get"]["responses"]
    for path, methods in API["paths"].items():
        form = "MessageError" if path.startswith("/v1/messages") else "Error"
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if status != "200" and (path, status) != ("/ready", "503"):
                    schema = response["content"]["application/json"]["schema"]
                    assert schema == {"$ref": f"#/components/schemas/{form}"}
    without = document(needs_key=False)
    assert "security" not in without
    assert "401" not in json.dumps(without["paths"])
