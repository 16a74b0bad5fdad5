"""Errors as answers in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from opgraft.errors import CheckpointError, EngineError, HTTPError, InputError, RequestError
from starlette.exceptions import HTTPException

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_BRANCHES = ("str", "int", "float", "bool", "dict", "list", "none")


def as_http_error(error: Exception) -> HTTPError:
    """Return the answer that an error gets; what is nobody's fault outside has no details."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, RequestError):
        return HTTPError(400, str(error).removeprefix("SamplingParams: "), field=error.field, code="invalid_value")
    if isinstance(error, InputError) and not isinstance(error, CheckpointError):
        return HTTPError(400, str(error), code="invalid_value")
    if isinstance(error, EngineError):
        return HTTPError(503, "the engine has stopped: try again when the server is back", code="engine_stopped")
    if isinstance(error, HTTPException) and error.status_code == 400:  # FastAPI could not read the body
        return HTTPError(400, "the body is not valid JSON, or it is nested too deeply", code="invalid_json")
    if isinstance(error, HTTPException):
        return HTTPError(error.status_code, str(error.detail), headers=error.headers)
    return HTTPError(500, "the server failed at this request: its log has the cause", code="internal_error")


@contextmanager
def at(field: str) -> Iterator[None]:
    """Name the field that is at fault for what is raised within the block."""
    try:
        yield
    except (RequestError, InputError) as error:
        answer = as_http_error(error)
        answer.field = answer.field or field
        raise answer from error


def content(error: HTTPError) -> dict[str, Any]:
    """Return the body of an answer that is an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}


def response(error: HTTPError) -> JSONResponse:
    """Return an answer that is an error."""
    return JSONResponse(content(error), error.status, headers=error.headers)


def _of_validation(error: RequestValidationError) -> HTTPError:
    """Tell the first of the faults that were found in a body, and the field that it is in."""
    faults: Sequence[Mapping[str, Any]] = error.errors()
    first = faults[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return HTTPError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    within = [fault for fault in faults if fault["loc"][:2] == first["loc"][:2]]
    deepest = max(within, key=lambda fault: len(fault["loc"]))  # of the alternatives of a union, the likeliest meant
    kind, field = deepest["type"], _field(deepest)
    if deepest["loc"] == ("body",) and kind == "model_attributes_type":
        return HTTPError(
            400,
            "the body is no JSON object, or was not sent with 'content-type: application/json'",
            code="invalid_json",
        )
    if kind == "extra_forbidden":
        return HTTPError(400, f"{field} is not supported: leave it out", field=field, code="unsupported_field")
    if kind == "missing":
        return HTTPError(400, f"{field or 'a body of JSON'} is missing", field=field, code="missing_field")
    reasons = " or ".join(dict.fromkeys(str(fault["msg"]) for fault in faults if _field(fault) == field))
    return HTTPError(400, f"{field or 'the body'}: {reasons}", field=field, code="invalid_value")


def _field(fault: Mapping[str, Any]) -> str | None:
    """Return the dotted name of a field at fault, without the names that a union has for its alternatives."""
    *outer, last = fault["loc"]
    unknown = fault["type"] == "extra_forbidden"
    parts = [part for part in outer[1:] if _names_a_field(part)]
    parts += [last] if outer and (unknown or _names_a_field(last)) else []
    return ".".join(str(part)[:80] for part in parts) or None


def _names_a_field(part: object) -> bool:
    return isinstance(part, int) or (str(part) not in _BRANCHES and re.fullmatch("[a-z_]+", str(part)) is not None)
