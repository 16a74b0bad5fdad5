"""Metrics of the server itself: its answers, what it has admitted, and its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opgraft.serving.server.admission import ADMITTED_PATHS, Admission
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

_METHODS = ("GET", "HEAD", "OPTIONS", "POST")


class HTTPMetrics:
    """Metrics beside those of the engine.

    Args:
        model_name: value of the label ``model_name``.
        registry: of all metrics of the server.
        admission: of requests.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry, admission: Admission) -> None:
        self._model_name, self._registry = model_name, registry
        self._answers = Counter(
            "opgraft:http_requests",
            "Answers over HTTP; 499 where the client has left.",
            ("model_name", "method", "path", "status"),
            registry=registry,
        )
        for name, text in (
            ("sequences", "Sequences that were admitted and have no token yet."),
            ("tokens", "Tokens of the prompts of these."),
        ):
            self.show(f"admitted_{name}", text, lambda name=name: getattr(admission, name))  # type: ignore[misc]
        ProcessCollector(registry=registry)

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show a value as it is whenever it is asked for."""
        gauge = Gauge(f"opgraft:{name}", text, ("model_name",), registry=self._registry)
        gauge.labels(self._model_name).set_function(value)

    def count(self, method: str, path: str, route: Any, status: int) -> None:
        """Count an answer; what has no route and was not refused is "other", as strangers may ask for any path."""
        path = path if path in ADMITTED_PATHS else getattr(route, "path", "other")
        self._answers.labels(
            self._model_name, method if method in _METHODS else "other", path, status
        ).inc()
