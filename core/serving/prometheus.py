"""``PrometheusExporter``: the engine's counters and the times of requests, under vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from opgraft.binding.explaining import Explanation
from opgraft.config import CacheConfig
from opgraft.engine.stats import FINISH_REASONS, HANDOVERS, PARTS, EngineStats
from opgraft.errors import InputError
from opgraft.models.extras import import_extra
from opgraft.serving.outputs import RequestMetrics, RequestOutput

SECONDS = tuple(factor * 10**power for power in range(-3, 4) for factor in (1, 2.5, 5))
TOKENS = tuple(factor * 10**power for power in range(7) for factor in (1, 2, 5))
"""Buckets up to a few million tokens, the longest contexts there are."""

ANSWERS = (1, 2, 3, 5, 10, 20, 50, 100)
_ENGINE = ("engine",)
_PROMPT_TOKENS = "prompt_tokens"
_PREFIX = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
_ENDED = frozenset({"stop", "length"})
"""The reasons of answers that came to their end."""


class MetricFamily(NamedTuple):
    """Metrics of one name.

    Attributes:
        kind: the class in ``prometheus_client``.
        text: the help.
        labels: all but ``model_name``.
        buckets: of a histogram; by default those of times and tokens.
    """

    kind: str
    text: str
    labels: tuple[str, ...] = _ENGINE
    buckets: tuple[float, ...] = ()


FAMILIES = MappingProxyType(
    {
        _PROMPT_TOKENS: MetricFamily(
            "Counter",
            "Tokens computed of prompts, also anew after a preemption, without those of the cache.",
        ),
        "generation_tokens": MetricFamily(
            "Counter", "Tokens that were sampled, also behind a stop string."
        ),
        "prefix_cache_queries": MetricFamily(
            "Counter", "Tokens of admitted sequences, each looked up in the cache."
        ),
        "prefix_cache_hits": MetricFamily(
            "Counter", "Tokens of admitted sequences that were found in the cache."
        ),
        "external_prefix_cache_hits": MetricFamily(
            "Counter", "Tokens of blocks that were read from the store of blocks."
        ),
        "num_preemptions": MetricFamily(
            "Counter", "Sequences that gave their blocks of the cache to others."
        ),
        "spec_decode_num_drafts": MetricFamily(
            "Counter", "Drafts of requests, one for each request and step."
        ),
        "spec_decode_num_draft_tokens": MetricFamily(
            "Counter", "Tokens that were drafted, accepted or not."
        ),
        "spec_decode_num_accepted_tokens": MetricFamily(
            "Counter", "Drafted tokens that were accepted, also behind a stop string."
        ),
        "engine_steps": MetricFamily("Counter", "Steps that the engine computed."),
        "engine_step_errors": MetricFamily("Counter", "Steps that failed."),
        "request_success": MetricFamily(
            "Counter", "Ended sequences, by reason.", (*_ENGINE, "finished_reason")
        ),
        "prompt_handovers": MetricFamily(
            "Counter",
            "Prompts for the second process (handover.tokens), by what became of them.",
            (*_ENGINE, "outcome"),
        ),
        "engine_step_seconds": MetricFamily(
            "Counter", "Time of steps, by part.", (*_ENGINE, "part")
        ),
        "engine_op_seconds": MetricFamily(
            "Counter",
            "Time of ops without the ops that they call, in some of the steps "
            "(server.time_ops_every).",
            (*_ENGINE, "op", "kernel", "provider"),
        ),
        "num_requests_running": MetricFamily("Gauge", "Sequences that hold blocks of the cache."),
        "num_requests_waiting": MetricFamily("Gauge", "Sequences that wait."),
        "kv_cache_usage_perc": MetricFamily("Gauge", "Share of the cache's blocks in use, 0 to 1."),
        "cache_config_info": MetricFamily(
            "Gauge",
            "The sizes and settings of the cache as labels, 1 for each engine.",
            (
                *_ENGINE,
                "block_size",
                "cache_dtype",
                "enable_prefix_caching",
                "num_gpu_blocks",
            ),
        ),
        "kernel_info": MetricFamily(
            "Gauge", "Kernels that run, 1 each.", ("op", "kernel", "provider")
        ),
        "time_to_first_token_seconds": MetricFamily(
            "Histogram", "From the arrival of a request to its first token."
        ),
        "inter_token_latency_seconds": MetricFamily(
            "Histogram", "From a step with tokens of a request to the next such step."
        ),
        "request_queue_time_seconds": MetricFamily(
            "Histogram", "From the arrival of a request to its first step."
        ),
        "request_time_per_output_token_seconds": MetricFamily(
            "Histogram", "Of a finished request: per token after the first."
        ),
        "e2e_request_latency_seconds": MetricFamily(
            "Histogram", "From the arrival of a request to its last token."
        ),
        "request_prefill_time_seconds": MetricFamily(
            "Histogram", "From the first step of a request to its first token."
        ),
        "request_decode_time_seconds": MetricFamily(
            "Histogram", "From the first token of a request to its last."
        ),
        "request_prompt_tokens": MetricFamily(
            "Histogram", "Tokens of the prompt of a finished request."
        ),
        "request_generation_tokens": MetricFamily(
            "Histogram", "Tokens of each answer of a finished request."
        ),
        "request_max_num_generation_tokens": MetricFamily(
            "Histogram", "Tokens of the longest answer of a finished request."
        ),
        "request_params_n": MetricFamily(
            "Histogram", "Answers that a finished request asked for.", buckets=ANSWERS
        ),
        "request_params_max_tokens": MetricFamily(
            "Histogram", "The max_tokens of a finished request, if the request has one."
        ),
        "iteration_tokens_total": MetricFamily("Histogram", "Tokens of a step."),
    }
)
"""The metrics by name, without the prefix. ``engine_*`` and ``kernel_info`` are not vLLM's."""

_COUNTERS = MappingProxyType(
    {
        _PROMPT_TOKENS: "prompt_tokens",
        "generation_tokens": "sampled_tokens",
        "prefix_cache_queries": "prefix_queries",
        "prefix_cache_hits": "prefix_hits",
        "external_prefix_cache_hits": "restored_tokens",
        "num_preemptions": "preemptions",
        "spec_decode_num_drafts": "drafts",
        "spec_decode_num_draft_tokens": "draft_tokens",
        "spec_decode_num_accepted_tokens": "accepted_tokens",
        "engine_steps": "steps",
        "engine_step_errors": "failed_steps",
    }
)
"""A metric → the field of ``Counters`` with its changes."""

_VLLM = "vllm"
"""The prefix under which boards that were made for vLLM find all metrics."""

FORMER_NAMES = MappingProxyType(
    {
        "time_per_output_token_seconds": "inter_token_latency_seconds",
        "gpu_cache_usage_perc": "kv_cache_usage_perc",
    }
)
"""Names in vLLM up to 0.10, for which its former boards ask → the present names."""


class _UnderFormerName:
    """Metrics once more, under a former name.

    Args:
        family: the metrics in ``prometheus_client``.
        name: the former name, with the prefix.
    """

    def __init__(self, family: Any, name: str) -> None:
        self._family = family
        self._name = name

    def collect(self) -> Iterator[Any]:
        """Yield copies of the metrics, as ``prometheus_client`` asks for at each scrape."""
        for metric in self._family.collect():
            present = metric.name
            metric.name = self._name
            samples = []
            for sample in metric.samples:
                # A sample has a suffix behind the name, such as "_bucket".
                name = sample.name.replace(present, self._name, 1)
                samples.append(sample._replace(name=name))
            metric.samples = samples
            yield metric


class PrometheusExporter:
    """Metrics in a registry of ``prometheus_client``, to be passed as ``on_step``.

    Names and labels are those of vLLM, with the prefix ``opgraft:``. Some of vLLM's are missing.
    Under the prefix ``"vllm"``, ``prompt_tokens`` means what vLLM means: the length of each prompt,
    with the tokens of the cache, counted once at the first token.
    The label ``engine`` is the number of a replica, 0 for a single engine. ``kernel_info`` counts
    for all replicas, and lacks this label. The extra ``metrics`` installs the library.

    Args:
        model_name: value of the label ``model_name`` of every metric.
        registry: a ``CollectorRegistry`` without another exporter; by default the library's own.
        prefix: of the names. Under ``"vllm"``, some metrics have a second, former name, too.

    Raises:
        InputError: ``prometheus_client`` is not installed, or the prefix is none.
    """

    def __init__(self, model_name: str, registry: Any = None, prefix: str = "opgraft") -> None:
        client = import_extra("prometheus_client", "metrics")
        if not _PREFIX.fullmatch(prefix):
            raise InputError(
                f"the prefix of metrics is {prefix!r:.80}: use letters, digits and underscores, "
                "and no digit at the begin"
            )
        registry = client.REGISTRY if registry is None else registry
        self._model_name = model_name
        self._families: dict[str, Any] = {}
        for name, family in FAMILIES.items():
            options: dict[str, Any] = {}
            if family.kind == "Histogram":
                usual = SECONDS if name.endswith("seconds") else TOKENS
                options["buckets"] = family.buckets or usual
            make = getattr(client, family.kind)
            labels = ("model_name", *family.labels)
            full = f"{prefix}:{name}"
            self._families[name] = make(full, family.text, labels, registry=registry, **options)
        self._is_as_vllm = prefix == _VLLM
        if self._is_as_vllm:
            for former, name in FORMER_NAMES.items():
                registry.register(_UnderFormerName(self._families[name], f"{prefix}:{former}"))
        self._engines: dict[int, dict[str, Any]] = {}
        self._ops: dict[tuple[Any, ...], Any] = {}
        self._last_tokens: dict[str, float] = {}
        # Before the first step, too, a scrape finds all metrics, with zeros.
        self._of_engine(0)

    def _of_engine(self, number: int) -> dict[str, Any]:
        """Return the metrics of an engine by name. From now on, the metrics are exported."""
        if number in self._engines:
            return self._engines[number]
        # The library looks labels up in a dict under a lock. Kept, a step need not do so.
        labels = self._model_name, str(number)
        made = {}
        for name, family in FAMILIES.items():
            if family.labels == _ENGINE:
                made[name] = self._families[name].labels(*labels)
        for reason in FINISH_REASONS:
            made[reason] = self._families["request_success"].labels(*labels, reason)
        for outcome in HANDOVERS:
            made[outcome] = self._families["prompt_handovers"].labels(*labels, outcome)
        for part in PARTS:
            made[part] = self._families["engine_step_seconds"].labels(*labels, part)
        self._engines[number] = made
        return made

    def __call__(self, stats: EngineStats, outputs: Sequence[RequestOutput]) -> None:
        """Add the changes since the last call, and the times of requests with news."""
        counted = stats.counters
        of = self._of_engine(stats.replica)
        # An encoder has no cache, and reports no outputs.
        by_length = self._is_as_vllm and stats.num_blocks
        for name, counter in _COUNTERS.items():
            if not (by_length and name == _PROMPT_TOKENS):
                of[name].inc(getattr(counted, counter))
        of["num_requests_running"].set(stats.running)
        of["num_requests_waiting"].set(stats.waiting)
        of["kv_cache_usage_perc"].set(stats.cache_usage)
        for called, seconds in counted.op_seconds.items():
            self._of_op(stats.replica, called).inc(seconds)
        for by_label in (counted.seconds, counted.finished, counted.handovers):
            for value, number in by_label.items():
                of[value].inc(number)
        if counted.steps:
            of["iteration_tokens_total"].observe(counted.prompt_tokens + counted.decode_tokens)
        for output in outputs:
            if output.metrics is not None:
                self._observe(of, output, output.metrics)

    def _of_op(self, replica: int, called: tuple[str, str, str]) -> Any:
        """Return the metric of the time of an op."""
        key = replica, *called
        if key not in self._ops:
            labels = self._model_name, *map(str, key)
            self._ops[key] = self._families["engine_op_seconds"].labels(*labels)
        return self._ops[key]

    def _observe(
        self, of: Mapping[str, Any], output: RequestOutput, metrics: RequestMetrics
    ) -> None:
        name = output.request_id
        last = metrics.last_token
        if last is not None:
            former = self._last_tokens.get(name)
            if former is None:
                if self._is_as_vllm:
                    of[_PROMPT_TOKENS].inc(len(output.prompt_token_ids))
                of["time_to_first_token_seconds"].observe(metrics.time_to_first_token)
                if metrics.time_in_queue is not None:
                    of["request_queue_time_seconds"].observe(metrics.time_in_queue)
            # The news of an answer that ended without a further token have the former time.
            elif last > former:
                of["inter_token_latency_seconds"].observe(last - former)
            self._last_tokens[name] = last
        if output.finished:
            # The ids of ended requests would pile up.
            self._last_tokens.pop(name, None)
            for metric, value in _of_finished(output, metrics):
                of[metric].observe(value)

    def show_kernels(self, explanation: Explanation) -> None:
        """Export the kernel and provider of each op, from ``LLM.explain``."""
        for row in explanation.rows:
            if row.runs:
                labels = self._model_name, row.op, row.kernel, str(row.provider)
                self._families["kernel_info"].labels(*labels).set(1)

    def show_cache(self, cache: CacheConfig, stats: EngineStats) -> None:
        """Export the settings of the cache and its number of blocks; nothing for an encoder.

        Args:
            cache: resolved settings.
            stats: of the engine with the cache.
        """
        if not stats.num_blocks:
            return
        info = self._families["cache_config_info"].labels(
            self._model_name,
            str(stats.replica),
            str(cache.block_size),
            cache.dtype,
            str(cache.prefix_reuse),
            str(stats.num_blocks),
        )
        # The labels have the content. Prometheus wants a number.
        info.set(1)


def _of_finished(output: RequestOutput, metrics: RequestMetrics) -> Iterator[tuple[str, float]]:
    """Yield the observations of a finished request, each with a name; none without a token.

    Aborted and failed requests would make times look shorter. They yield nothing.
    """
    if _ENDED.isdisjoint(answer.finish_reason for answer in output.outputs):
        return
    if metrics.first_token is None or metrics.last_token is None:
        return
    decode = metrics.last_token - metrics.first_token
    begin = metrics.admitted or metrics.arrival
    lengths = [len(answer.token_ids) for answer in output.outputs]
    longest = max(lengths)
    yield "e2e_request_latency_seconds", metrics.last_token - metrics.arrival
    yield "request_prefill_time_seconds", metrics.first_token - begin
    yield "request_decode_time_seconds", decode
    yield "request_prompt_tokens", len(output.prompt_token_ids)
    for length in lengths:
        yield "request_generation_tokens", length
    yield "request_max_num_generation_tokens", longest
    yield "request_params_n", len(lengths)
    if metrics.max_tokens is not None:
        yield "request_params_max_tokens", metrics.max_tokens
    if longest > 1:
        yield "request_time_per_output_token_seconds", decode / (longest - 1)
