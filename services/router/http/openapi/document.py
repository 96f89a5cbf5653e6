"""Makes the OpenAPI document of the public routes from the types that bodies are decoded into.

    struct --msgspec--> JSON Schema --here--> components of the document

A field's bounds come from its type, and its description from the docstring of its class. So a new
field of a body needs nothing more, and a new route needs to be `described` (operation.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from inspect import cleandoc
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from msgspec import inspect

from pagewire import __version__
from pagewire.services.router.http.api.anthropic.objects import MessageError
from pagewire.services.router.http.api.openai.objects import Error
from pagewire.services.router.http.api.openai.timings import HEADER as TIMINGS_HEADER
from pagewire.services.router.http.operation import MESSAGES, TAGS, Operation, Struct, operation_of
from pagewire.services.router.http.routes.embeddings import embedding_router
from pagewire.services.router.http.routes.generation import router
from pagewire.services.router.http.routes.messages import messages_router
from pagewire.services.router.http.routes.responses import response_router
from pagewire.services.router.http.routes.tokens import token_router

ROUTERS = (router, messages_router, token_router, embedding_router, response_router)
ROUTES = [route for each in ROUTERS for route in each.routes if isinstance(route, APIRoute)]

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_ATTRIBUTES = "Attributes:\n"
_ATTRIBUTE = re.compile(r"^    (\w+): ((?:.+\n?)(?:^     .*\n?)*)", re.MULTILINE)
_PARAMETER = re.compile(r"{(\w+)}")
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_PATH_FIELDS = {
    "model_id": "one of the model's names",
    "response_id": "the id of a stored response, created with an API key of the same name",
}
_DESCRIPTION = """
One model on several workers, with OpenAI's API, Anthropic's Messages API, and vLLM's fields.

Fields that no schema names are ignored. Each response has the header `x-request-id`: the id that
the request has in the server's logs, which a request may choose by the same header.
"""


@cache
def openapi_document(needs_key: bool, model: str) -> bytes:
    """Return the document as JSON.

    Args:
        needs_key: requests need an API key.
        model: the name of the model in examples.
    """
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        paths.setdefault(route.path_format, {})[_method(route)] = _operation(
            route, needs_key, model
        )
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Pagewire", "version": __version__, "description": _DESCRIPTION.strip()},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": _components(),
            "securitySchemes": _KEY_SCHEMES,
        },
    }
    if needs_key:
        document["security"] = [{"bearer": []}, {"x-api-key": []}]
    return msgspec.json.encode(document)


def _method(route: APIRoute) -> str:
    # HEAD is answered as GET, and so not described.
    (method,) = (route.methods or set()) - {"HEAD"}
    return method.lower()


def _operation(route: APIRoute, needs_key: bool, model: str) -> Schema:
    of = operation_of(route.openapi_extra)
    operation: Schema = {
        "operationId": _identifier(route),
        "tags": route.tags,
        "summary": route.description,
        "parameters": list(_parameters(route, of, model)),
        "responses": _responses(route, of, needs_key and not of.is_open),
    }
    if of.body is not None:
        content: Schema = {"schema": _ref(of.body)}
        if of.example is not None:
            content["example"] = {"model": model, **of.example}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if of.is_open and needs_key:
        operation["security"] = []
    return operation


def _identifier(route: APIRoute) -> str:
    words = re.findall(r"[a-z]+", _PARAMETER.sub("by_id", route.path_format))
    return "_".join([_method(route), *(word for word in words if word != "v")])


def _parameters(route: APIRoute, of: Operation, model: str) -> Iterable[Schema]:
    for name in _PARAMETER.findall(route.path_format):
        described = {"name": name, "in": "path", "description": _PATH_FIELDS[name]}
        example = {"example": model} if name == "model_id" else {}
        schema = {"type": "string", "minLength": 1}
        yield {**described, "required": True, "schema": schema, **example}
    if of.query is not None:
        for name, schema in _plain_schema(of.query)["properties"].items():
            described = {"description": schema.pop("description", "")}
            yield {"name": name, "in": "query", **described, "schema": _not_null(schema)}
    if of.answer is not None and "timings" in of.answer.__struct_fields__:
        text = "1: the response shows where the time went, as with `timings` in the body."
        schema = {"type": "string", "enum": ["0", "1"]}
        yield {"name": TIMINGS_HEADER, "in": "header", "description": text, "schema": schema}


def _error(route: APIRoute) -> Struct:
    return MessageError if MESSAGES in route.tags else Error


def _responses(route: APIRoute, of: Operation, needs_key: bool) -> Schema:
    responses: Schema = {}
    if of.answer is not None:
        content: Schema = {"application/json": {"schema": _ref(of.answer)}}
        if of.chunk is not None:
            content["text/event-stream"] = {"schema": _event(of.chunk, _error(route))}
        responses["200"] = {"description": "The answer.", "content": content}
        if links := _links(route):
            responses["200"]["links"] = links
    for status in sorted(of.statuses(route.path_format) | ({401} if needs_key else set())):
        error = {"schema": _ref(_error(route))}
        responses[str(status)] = {
            "description": f"{HTTPStatus(status).phrase}.",
            "content": {"application/json": error},
        }
    if of.unready:
        responses["503"] = {"description": "Requests cannot be answered now.", "content": content}
    return responses


def _links(route: APIRoute) -> Schema:
    """Return the routes that read or change what a request creates, by the id in the answer."""
    below = re.compile(re.escape(route.path_format) + r"/{(\w+)}(/\w+)?")
    links: Schema = {}
    for target in ROUTES:
        if _method(route) == "post" and (named := below.fullmatch(target.path_format)):
            parameters = {named[1]: "$response.body#/id"}
            links[_identifier(target)] = {
                "operationId": _identifier(target),
                "parameters": parameters,
            }
    return links


def _event(chunk: Struct, error: Struct) -> Schema:
    """Return the schema of a stream's events, one of which may be an error."""
    kinds = {"anyOf": [_ref(chunk), _ref(error)]}
    encoded = {"contentMediaType": "application/json", "contentSchema": kinds}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, encoded]}
    return {
        "description": "A server-sent event, of which there are several if `stream` is true.",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _ref(kind: Struct) -> Schema:
    return {"$ref": _REF + kind.__name__}


def _components() -> dict[str, Schema]:
    """Return the schemas of all types."""
    operations = [operation_of(route.openapi_extra) for route in ROUTES]
    bodies = [of.body for of in operations if of.body is not None]
    written = [of.answer for of in operations] + [of.chunk for of in operations]
    answers: list[Struct] = [*filter(None, written), Error, MessageError]
    kinds: list[Struct] = [*bodies, *answers]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    classes = {kind.__name__: kind for kind in _structs(kinds)}
    described = {name: _described(components[name], classes[name]) for name in sorted(components)}
    for kind in _structs(answers):
        _require_written_fields(described[kind.__name__], kind)
    text = "Not supported: only values that change nothing are accepted."
    for of in operations:
        for name, neutral in sorted(of.refused.items()):
            properties = described[of.body.__name__ if of.body else ""]["properties"]
            properties[name] = {"enum": list(neutral), "description": text}
    return described


def _require_written_fields(schema: Schema, kind: Struct) -> None:
    """Let all fields be required that an answer always has: those whose default is not `UNSET`."""
    fields = msgspec.structs.fields(kind)
    written = [field.encode_name for field in fields if field.default is not msgspec.UNSET]
    schema["required"] = list(dict.fromkeys([*schema.get("required", ()), *written]))
    for inner in schema["properties"].values():
        inner.pop("default", None)


def _structs(kinds: Iterable[Struct]) -> set[Struct]:
    """Return these classes and those of their fields, at any depth."""
    structs: set[Struct] = set()
    todo: list[Any] = list(inspect.multi_type_info(kinds))
    while todo:
        each = todo.pop()
        if isinstance(each, tuple):
            todo += each
        elif isinstance(each, msgspec.Struct):
            if isinstance(each, inspect.StructType):
                if each.cls in structs:
                    continue
                structs.add(each.cls)
            todo += [getattr(each, name) for name in each.__struct_fields__]
    return structs


def _plain_schema(kind: Struct) -> Schema:
    """Return the schema of a struct without structs in it."""
    return _described(msgspec.json.schema_components([kind])[1][kind.__name__], kind)


def _described(schema: Schema, kind: Struct) -> Schema:
    """Return the schema of a struct with the descriptions of its docstrings."""
    docs = _attributes(kind)
    properties = {
        name: _field(_portable(inner), docs.get(name, ""))
        for name, inner in schema["properties"].items()
    }
    about = _docstring(kind).partition(_ATTRIBUTES)[0]
    return {**schema, "description": " ".join(about.split()), "properties": properties}


def _field(schema: Schema, doc: str) -> Schema:
    if schema.get("default", 0) is None:
        del schema["default"]
    if not doc:
        return schema
    rule = schema.pop("description", None)
    text = f"{doc} Must be {rule}." if rule else doc
    return {"description": text, **schema}


def _docstring(kind: Struct) -> str:
    return cleandoc(kind.__dict__.get("__doc__") or "")


def _attributes(kind: Struct) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of fields."""
    descriptions: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        part = _docstring(base).partition(_ATTRIBUTES)[2]
        for name, text in _ATTRIBUTE.findall(part):
            words = " ".join(text.split())
            descriptions[name] = words[:1].upper() + words[1:]
    return descriptions


def _portable(schema: Any) -> Any:
    """Return a schema whose patterns are ECMA's, not Python's."""
    if isinstance(schema, list):
        return [_portable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    portable = {name: _portable(part) for name, part in schema.items()}
    if isinstance(pattern := portable.get("pattern"), str):
        portable["pattern"] = re.sub(r"\\Z\Z", "$", re.sub(r"\A\\A", "^", pattern))
    return portable


def _not_null(schema: Schema) -> Schema:
    """Return the schema of a field of a query, which cannot be null."""
    some = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    return some[0] if len(some) == 1 else schema
