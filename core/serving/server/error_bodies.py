"""``error_body``: an error in the form of OpenAI's interface or of Anthropic's."""

# Imported before torch and FastAPI, for answers while the server starts.

from __future__ import annotations

from typing import Any

from opgraft.errors import HTTPError

MESSAGES_PATH = "/v1/messages"
"""The beginning of the paths of Anthropic's interface."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_TYPES_OF_ANTHROPIC = {
    **_TYPES,
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: HTTPError, path: str = "") -> dict[str, Any]:
    """Return the body of an error's answer.

    Args:
        error: the fault.
        path: of the request.
    """
    if path.startswith(MESSAGES_PATH):
        return _body_of_anthropic(error)
    usual = "invalid_request_error" if error.status < 500 else "server_error"
    fault = {
        "message": str(error),
        "type": _TYPES.get(error.status, usual),
        "param": error.field,
        "code": error.code,
    }
    return {"error": fault}


def _body_of_anthropic(error: HTTPError) -> dict[str, Any]:
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES_OF_ANTHROPIC.get(error.status, usual)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
