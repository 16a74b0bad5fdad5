"""Errors as answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from opgraft.engine.lora.held import ADAPTER_UNUSABLE
from opgraft.errors import (
    CheckpointError,
    EngineError,
    HTTPError,
    InputError,
    RequestError,
    near_matches,
)
from opgraft.serving.server.error_bodies import error_body
from starlette.exceptions import HTTPException

_NOT_HERE = {
    404: "this server has no such path: /openapi.json lists those that it has",
    405: "the path does not take this method: /openapi.json lists those that it takes",
}
"""Status → message, in place of the name of the status."""

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a number that is finite",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "infinite_inside": "an object of finite numbers",
    "int_type": "a whole number",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "text",
    "string_unicode": "text without halves of surrogate pairs",
    "too_long": "at most {max_length} items",
}
"""Kind of fault in pydantic → expected value of the field."""

_OF_PYTHON = {
    r"(?<![\w'\"])None(?![\w'\"])": "null",
    r", or raise model\.max_model_len as far as the model allows": "",
    r", logits_processors(?= and )": "",
    r"\blogits_processors\b": "logit_bias and penalties",
}
"""Patterns of words for callers from Python and for operators → words for clients."""

_KINDS = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a number",
    list: "a list",
    str: "text",
}
"""Type of a value → words for an error."""

_SHOWN_VALUE = 20
"""Characters of a word that an error shows."""

_SHOWN = 80
"""Characters of a field's name in an error."""


def as_http_error(error: Exception) -> HTTPError:
    """Return the answer to an error. A fault of the server is told without details."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, RequestError) and error.code == ADAPTER_UNUSABLE:
        # The operator has given the path. Clients know the name alone.
        message = "the adapter cannot be read at present: the server's log has the cause"
        return HTTPError(503, message, code=error.code)
    if isinstance(error, RequestError):
        message = worded_for_clients(error.message)
        return HTTPError(400, message, field=error.field, code=error.code)
    if isinstance(error, InputError) and not isinstance(error, CheckpointError):
        return HTTPError(400, str(error), code="invalid_value")
    if isinstance(error, EngineError):
        message = "the engine has stopped: try again when the server is back"
        return HTTPError(503, message, code="engine_stopped")
    if isinstance(error, HTTPException) and error.status_code == 400:
        return HTTPError(400, _unreadable(error.__cause__), code="invalid_json")
    if isinstance(error, HTTPException):
        reason = _NOT_HERE.get(error.status_code, str(error.detail))
        return HTTPError(error.status_code, reason, headers=error.headers)
    message = "the server failed at this request: its log has the cause"
    return HTTPError(500, message, code="internal_error")


def _unreadable(cause: BaseException | None) -> str:
    """Return the message about a body that FastAPI could not read."""
    if isinstance(cause, UnicodeDecodeError):
        return "the body is not UTF-8, as JSON is"
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply"
    return "the body is not valid JSON"


def worded_for_clients(message: str) -> str:
    """Return a message of the engine without advice for callers from Python and for operators."""
    for pattern, word in _OF_PYTHON.items():
        message = re.sub(pattern, word, message)
    return message


@contextmanager
def at(field: str) -> Iterator[None]:
    """Name the field at fault in each error of the block."""
    try:
        yield
    except (RequestError, InputError) as error:
        answer = as_http_error(error)
        # An inner block knows the field better.
        answer.field = answer.field or field
        raise answer from error


def renamed(error: HTTPError, names: Mapping[str, str]) -> HTTPError:
    """Return an error about a field with the name that the client has written.

    Args:
        error: about a field of a chat.
        names: parts of names in chats → parts in the client's interface.
    """
    field = error.field
    for ours, theirs in names.items():
        field = field and re.sub(rf"\b{re.escape(ours)}\b", theirs, field)
    # Plain words, such as "messages", stand in texts for the thing, too.
    if error.field and not error.field.isalpha():
        error.args = (str(error).replace(error.field, str(field)),)
    error.field = field
    return error


def response(error: HTTPError, path: str) -> JSONResponse:
    """Return the answer of an error to a request for a path."""
    return JSONResponse(error_body(error, path), error.status, headers=error.headers)


def _of_validation(error: RequestValidationError) -> HTTPError:
    """Return the error about the first fault in a body, with the field."""
    fault: Mapping[str, Any] = error.errors()[0]
    kind = fault["type"]
    field = _field(fault["loc"])
    context = fault.get("ctx", {})
    if kind == "json_invalid":
        reason = context.get("error", "it cannot be parsed")
        place = fault["loc"][-1]
        message = f"the body is not valid JSON: {reason} at character {place}"
        return HTTPError(400, message, code="invalid_json")
    if field is None and kind == "model_attributes_type":
        reason = "is no JSON object"
        # FastAPI leaves a body of another content type as bytes.
        if isinstance(fault.get("input"), bytes):
            reason = "was not sent with 'content-type: application/json'"
        return HTTPError(400, f"the body {reason}", code="invalid_json")
    if kind == "extra_forbidden":
        advice = _advice(str(fault["loc"][-1]), context["known"])
        message = f"{field} is not supported: {advice}"
        return HTTPError(400, message, field=field, code="unsupported_field")
    if kind == "not_followed":
        message = f"{field} is {context['value']}, which is not supported: {context['advice']}"
        return HTTPError(400, message, field=field, code="unsupported_value")
    if kind == "missing":
        message = f"{field or 'a body of JSON'} is missing"
        return HTTPError(400, message, field=field, code="missing_field")
    expected = _EXPECTED.get(kind, "another value").format(**context)
    message = f"{field or 'the body'}: expected {expected}{_instead(fault)}"
    return HTTPError(400, message, field=field, code="invalid_value")


def _instead(fault: Mapping[str, Any]) -> str:
    """Return the end of an error about a value of a wrong type, or of none of a few words."""
    given = fault.get("input")
    if fault["type"] == "literal_error" and isinstance(given, str):
        # The log has the error, and no prompts.
        return f", not {given!r}" if len(given) <= _SHOWN_VALUE and given.isidentifier() else ""
    if not fault["type"].endswith("_type"):
        return ""
    return f", not {_KINDS[type(given)]}" if type(given) in _KINDS else ""


def _advice(name: str, known: Sequence[str]) -> str:
    """Return the advice about an unknown field."""
    near = near_matches(name[:_SHOWN], known)
    if not near:
        return "leave it out"
    listed = " or ".join(map(repr, near))
    return f"did you mean {listed}?"


def _field(place: Sequence[str | int]) -> str | None:
    """Return the name of a field at fault, such as ``messages[0].content``."""
    # The first part is the body.
    name = ""
    for part in place[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part[:_SHOWN]}"
    return name.removeprefix(".") or None
