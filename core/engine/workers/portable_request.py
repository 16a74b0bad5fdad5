"""Refuse requests that cannot be sent to another process."""

from __future__ import annotations

import io
import pickle
from typing import Any

from opgraft.base.text import described
from opgraft.engine.request import Request
from opgraft.errors import RequestError


def expect_portable(request: Request) -> None:
    """Refuse a request with objects that cannot be sent to another process.

    Logits processors are such objects: they are functions of this process.

    Raises:
        RequestError: the request has such an object.
    """
    if request.params.logits_processors:
        raise RequestError(
            f"request {request.request_id!r} has logits processors, and the model runs in a "
            "process of its own: leave them out, or set parallel.executor to in_process",
            "logits_processors",
        )
    try:
        pickled = pickle.dumps((request.request_id, request.params, request.bad_words))
        _UnpicklerElsewhere(io.BytesIO(pickled)).load()
    # Classes of the request may raise anything.
    except Exception as error:
        raise RequestError(
            f"request {request.request_id!r} cannot be sent to the process of the model "
            f"({described(error)}): use plain texts and numbers, or set parallel.executor to "
            "in_process"
        ) from error


class _UnpicklerElsewhere(pickle.Unpickler):
    """Unpickles like a process with another ``__main__``."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            raise pickle.UnpicklingError(
                f"{name} is a class of the script, which that process does not have"
            )
        return super().find_class(module, name)
