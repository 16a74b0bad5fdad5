"""Metrics of the server: answers, admitted work, and the process."""

from __future__ import annotations

from collections.abc import Callable

from opgraft.serving.server.admission import Admission
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "POST")


class HTTPMetrics:
    """Metrics beside those of the engine.

    Args:
        model_name: the value of the label ``model_name``.
        registry: of all metrics of the server.
        admission: of requests.
        prefix: of the names.
    """

    def __init__(
        self, model_name: str, registry: CollectorRegistry, admission: Admission, prefix: str
    ) -> None:
        self._model_name = model_name
        self._prefix = prefix
        self._registry = registry
        self._answers = Counter(
            f"{prefix}:http_requests",
            "Answers over HTTP; 499 where the client has left.",
            ("model_name", "method", "path", "status"),
            registry=registry,
        )
        self.show(
            "admitted_sequences",
            "Sequences that were admitted and have no token yet.",
            lambda: admission.sequences,
        )
        self.show("admitted_tokens", "Tokens of the prompts of these.", lambda: admission.tokens)
        ProcessCollector(registry=registry)

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show the value of a function at each request for metrics."""
        gauge = Gauge(f"{self._prefix}:{name}", text, ("model_name",), registry=self._registry)
        gauge.labels(self._model_name).set_function(value)

    def count(self, method: str, path: str, status: int) -> None:
        """Count an answer. ``path`` is one of few."""
        if method not in _METHODS:
            method = "other"
        self._answers.labels(self._model_name, method, path, status).inc()
