"""``PrometheusExporter``: the engine's counters and the times of requests, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from opgraft.binding.explaining import Explanation
from opgraft.engine.stats import FINISH_REASONS, PARTS, EngineStats
from opgraft.models.extras import import_extra
from opgraft.serving.outputs import RequestMetrics, RequestOutput

COUNTERS = MappingProxyType(
    {
        "prompt_tokens": (
            "Tokens computed of prompts, also anew after a preemption, without tokens of the cache."
        ),
        "generation_tokens": "Tokens that were sampled, also behind a stop string.",
        "prefix_cache_queries": "Tokens of admitted sequences, each looked up in the cache.",
        "prefix_cache_hits": "Tokens of admitted sequences that were found in the cache.",
        "num_preemptions": "Sequences that gave their blocks of the cache to others.",
        "spec_decode_num_drafts": "Drafts of requests, one for each request and step.",
        "spec_decode_num_draft_tokens": "Tokens that were drafted, accepted or not.",
        "spec_decode_num_accepted_tokens": (
            "Drafted tokens that were accepted, also behind a stop string."
        ),
        "engine_steps": "Steps that the engine computed.",
        "engine_step_errors": "Steps that failed.",
    }
)
GAUGES = MappingProxyType(
    {
        "num_requests_running": "Sequences that hold blocks of the cache.",
        "num_requests_waiting": "Sequences that wait.",
        "kv_cache_usage_perc": "Share of the cache's blocks that are in use, 0 to 1.",
    }
)
HISTOGRAMS = MappingProxyType(
    {
        "time_to_first_token_seconds": "From the arrival of a request to its first token.",
        "request_queue_time_seconds": "From the arrival of a request to its first step.",
        "request_time_per_output_token_seconds": (
            "Of a finished request: per token after the first."
        ),
        "e2e_request_latency_seconds": "From the arrival of a request to its last token.",
        "request_prefill_time_seconds": "From the first step of a request to its first token.",
        "request_decode_time_seconds": "From the first token of a request to its last.",
        "request_prompt_tokens": "Tokens of the prompt of a finished request.",
        "request_generation_tokens": "Tokens of the longest answer of a finished request.",
        "iteration_tokens_total": "Tokens of a step.",
    }
)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_ENDED = "Ended sequences, by reason."
_SECONDS = "Time of steps, by part."
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class PrometheusExporter:
    """Metrics in a registry of ``prometheus_client``, to be passed as ``on_step``.

    Names and labels are those of vLLM, with the prefix ``opgraft:``. Some of vLLM's are missing.
    The label ``engine`` is the number of a replica, 0 for a single engine. ``kernel_info`` counts
    for all replicas, and lacks this label. The extra ``metrics`` installs the library.

    Args:
        model_name: value of the label ``model_name`` of every metric.
        registry: a ``CollectorRegistry`` without another exporter; by default the library's own.

    Raises:
        InputError: ``prometheus_client`` is not installed.
    """

    def __init__(self, model_name: str, registry: Any = None) -> None:
        self._client = import_extra("prometheus_client", "metrics")
        self._registry = self._client.REGISTRY if registry is None else registry
        self._model_name = model_name
        self._families: dict[str, Any] = {}
        for name, text in COUNTERS.items():
            self._families[name] = self._family("Counter", name, text)
        for name, text in GAUGES.items():
            self._families[name] = self._family("Gauge", name, text)
        for name, text in HISTOGRAMS.items():
            self._families[name] = self._histogram(name, text)
        self._families["request_success"] = self._family(
            "Counter", "request_success", _ENDED, "engine", "finished_reason"
        )
        self._families["engine_step_seconds"] = self._family(
            "Counter", "engine_step_seconds", _SECONDS, "engine", "part"
        )
        self._kernels = self._family(
            "Gauge", "kernel_info", "Kernels that run, 1 each.", "op", "kernel", "provider"
        )
        self._engines: dict[int, dict[str, Any]] = {}
        self._begun: set[str] = set()
        self._of_engine(0)

    def _histogram(self, name: str, text: str) -> Any:
        buckets = SECONDS if name.endswith("seconds") else TOKENS
        return self._family("Histogram", name, text, buckets=buckets)

    def _family(self, kind: str, name: str, text: str, *labels: str, **options: Any) -> Any:
        labelled = ("model_name", *(labels or ("engine",)))
        made = getattr(self._client, kind)
        return made(f"opgraft:{name}", text, labelled, registry=self._registry, **options)

    def _of_engine(self, number: int) -> dict[str, Any]:
        """Return the metrics of an engine by name. From now on, the metrics are exported."""
        if number in self._engines:
            return self._engines[number]
        labels = self._model_name, str(number)
        made = {}
        for name in (*COUNTERS, *GAUGES, *HISTOGRAMS):
            made[name] = self._families[name].labels(*labels)
        for reason in FINISH_REASONS:
            made[reason] = self._families["request_success"].labels(*labels, reason)
        for part in PARTS:
            made[part] = self._families["engine_step_seconds"].labels(*labels, part)
        self._engines[number] = made
        return made

    def __call__(self, stats: EngineStats, outputs: Sequence[RequestOutput]) -> None:
        """Add the changes since the last call, and the times of requests with news."""
        counted = stats.counters
        of = self._of_engine(stats.replica)
        of["prompt_tokens"].inc(counted.prompt_tokens)
        of["generation_tokens"].inc(counted.sampled_tokens)
        of["prefix_cache_queries"].inc(counted.prefix_queries)
        of["prefix_cache_hits"].inc(counted.prefix_hits)
        of["num_preemptions"].inc(counted.preemptions)
        of["spec_decode_num_drafts"].inc(counted.drafts)
        of["spec_decode_num_draft_tokens"].inc(counted.draft_tokens)
        of["spec_decode_num_accepted_tokens"].inc(counted.accepted_tokens)
        of["engine_steps"].inc(counted.steps)
        of["engine_step_errors"].inc(counted.failed_steps)
        of["num_requests_running"].set(stats.running)
        of["num_requests_waiting"].set(stats.waiting)
        of["kv_cache_usage_perc"].set(stats.cache_usage)
        for value, number in (*counted.seconds.items(), *counted.finished.items()):
            of[value].inc(number)
        if counted.steps:
            of["iteration_tokens_total"].observe(counted.prompt_tokens + counted.decode_tokens)
        for output in outputs:
            if output.metrics is not None:
                self._observe(of, output, output.metrics)

    def _observe(
        self, of: Mapping[str, Any], output: RequestOutput, metrics: RequestMetrics
    ) -> None:
        observed: dict[str, float | None] = {}
        if metrics.first_token is not None and output.request_id not in self._begun:
            self._begun.add(output.request_id)
            observed["time_to_first_token_seconds"] = metrics.time_to_first_token
            observed["request_queue_time_seconds"] = metrics.time_in_queue
        if output.finished:
            self._begun.discard(output.request_id)
            observed |= _of_finished(output, metrics)
        for name, value in observed.items():
            if value is not None:
                of[name].observe(value)

    def show_kernels(self, explanation: Explanation) -> None:
        """Export the kernel and provider of each op, from ``LLM.explain``."""
        for row in explanation.rows:
            if row.runs:
                labels = self._model_name, row.op, row.kernel, str(row.provider)
                self._kernels.labels(*labels).set(1)


def _of_finished(output: RequestOutput, metrics: RequestMetrics) -> dict[str, float]:
    """Return the observations of a finished request, by name; none without a token."""
    if metrics.first_token is None or metrics.last_token is None:
        return {}
    decode = metrics.last_token - metrics.first_token
    begin = metrics.admitted or metrics.arrival
    tokens = max(len(answer.token_ids) for answer in output.outputs)
    observed = {
        "e2e_request_latency_seconds": metrics.last_token - metrics.arrival,
        "request_prefill_time_seconds": metrics.first_token - begin,
        "request_decode_time_seconds": decode,
        "request_prompt_tokens": len(output.prompt_token_ids),
        "request_generation_tokens": tokens,
    }
    if tokens > 1:
        observed["request_time_per_output_token_seconds"] = decode / (tokens - 1)
    return observed
