"""Metrics have the names that dashboards know, and the numbers of what ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.errors import InputError
from opgraft.serving.llm import LLM
from opgraft.serving.prometheus import SECONDS, TOKENS, PrometheusExporter
from support.engines import add, in_its_thread
from support.random_decoders import written

prometheus = pytest.importorskip("prometheus_client")

KNOWN = """
num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total prompt_tokens_total
generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total request_success_total iteration_tokens_total
external_prefix_cache_hits_total
time_to_first_token_seconds request_queue_time_seconds request_time_per_output_token_seconds
e2e_request_latency_seconds inter_token_latency_seconds cache_config_info request_params_n
request_params_max_tokens request_max_num_generation_tokens
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
"""
"""Metrics of vLLM that are here too, without its prefix."""


@pytest.fixture
def served(tmp_path: Path) -> tuple[LLM, Any]:
    """A model that has answered three prompts of 4 and 12 tokens and given up one, and its registry."""
    written("Llama", tmp_path / "llama")
    registry = prometheus.CollectorRegistry()
    exporter = PrometheusExporter("small", registry)
    settings: dict[str, Any] = {"cache.num_blocks": 40, "load.progress": False}
    llm = LLM(str(tmp_path / "llama"), on_step=exporter, max_model_len=64, block_size=4, **settings)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.generate([[5] * 4, [6] * 12], params)
    llm.generate([6] * 12, params)

    def give_up() -> None:
        add(llm.engine, "a", [5, 6], params)
        llm.engine.step()
        llm.engine.abort("a")

    in_its_thread(llm, give_up)
    exporter.show_kernels(llm.explain())
    return llm, registry


def value(registry: Any, name: str, **labels: str) -> float:
    found = registry.get_sample_value(
        f"opgraft:{name}", {"model_name": "small", "engine": "0", **labels}
    )
    assert found is not None, name
    return float(found)


def test_numbers_are_those_of_what_ran(served: tuple[LLM, Any]) -> None:
    """Counters are the totals of the engine, gauges its state now, and each request is observed once."""
    llm, registry = served
    totals = llm.stats().counters
    assert value(registry, "prompt_tokens_total") == totals.prompt_tokens == 4 + 12 + 4 + 2
    assert value(registry, "generation_tokens_total") == totals.sampled_tokens == 3 * 5 + 1
    assert value(registry, "prefix_cache_hits_total") == 8
    assert value(registry, "prefix_cache_queries_total") == 4 + 12 + 12 + 2
    assert value(registry, "engine_steps_total") == totals.steps == 11
    assert value(registry, "request_success_total", finished_reason="length") == 3
    assert value(registry, "request_success_total", finished_reason="abort") == 1
    assert value(registry, "num_requests_running") == value(registry, "kv_cache_usage_perc") == 0
    for name, count in (
        ("time_to_first_token_seconds", 4),
        ("request_queue_time_seconds", 4),
        ("request_time_per_output_token_seconds", 3),
        ("iteration_tokens_total", 11),
        ("request_prompt_tokens", 3),
        ("request_generation_tokens", 3),
        ("request_max_num_generation_tokens", 3),
        ("request_params_n", 3),
        ("inter_token_latency_seconds", 3 * 4),
    ):
        assert value(registry, f"{name}_count") == count
    assert (
        value(registry, "iteration_tokens_total_sum") == totals.prompt_tokens + totals.decode_tokens
    )
    assert value(registry, "engine_step_seconds_total", part="model") == pytest.approx(
        totals.seconds["model"]
    )
    assert value(registry, "request_params_max_tokens_sum") == 3 * 5
    queue = value(registry, "request_queue_time_seconds_sum")
    first = value(registry, "time_to_first_token_seconds_sum")
    whole = value(registry, "e2e_request_latency_seconds_sum")
    assert 0 < queue < first < whole
    prompts, answers = (
        value(registry, f"request_{part}_time_seconds_sum") for part in ("prefill", "decode")
    )
    # The request that was given up has waited, too.
    assert 0 < queue + prompts + answers - whole < queue


def test_numbers_as_vllm_counts(tmp_path: Path) -> None:
    """Under vLLM's prefix, prompts count with their tokens of the cache; buckets tell 2 answers from 3."""
    written("Llama", tmp_path / "llama")
    registry = prometheus.CollectorRegistry()
    exporter = PrometheusExporter("small", registry, prefix="vllm")
    settings: dict[str, Any] = {"cache.num_blocks": 40, "load.progress": False}
    llm = LLM(str(tmp_path / "llama"), on_step=exporter, max_model_len=64, block_size=4, **settings)
    params = SamplingParams(n=2, temperature=1, max_tokens=5, ignore_eos=True)
    for _ in range(2):
        llm.generate([6] * 12, params)
    assert llm.stats().counters.prompt_tokens < 24
    labels = {"model_name": "small", "engine": "0"}
    assert registry.get_sample_value("vllm:prompt_tokens_total", labels) == 24
    for most, count in (("1.0", 0), ("2.0", 2)):
        bucket = registry.get_sample_value("vllm:request_params_n_bucket", {**labels, "le": most})
        assert bucket == count


def test_long_prompts_have_buckets() -> None:
    """Lengths of contexts up to a million tokens, and times up to an hour, are not all in the last bucket."""
    assert {50_000, 200_000, 1_000_000} <= set(TOKENS)
    assert max(SECONDS) >= 3600


def test_prefix_is_a_name() -> None:
    """A prefix that Prometheus does not take is refused."""
    with pytest.raises(InputError, match="the prefix of metrics is 'my-app'"):
        PrometheusExporter("small", prometheus.CollectorRegistry(), prefix="my-app")


def test_drafts_are_counted(tmp_path: Path) -> None:
    """Drafts, their tokens and the accepted ones are the totals of the engine; the others came with a token each."""
    written("Llama", tmp_path / "llama")
    registry = prometheus.CollectorRegistry()
    settings: dict[str, Any] = {"cache.num_blocks": 40, "load.progress": False}
    settings |= {"speculation.method": "ngram", "speculation.exact": False}
    exporter = PrometheusExporter("small", registry)
    llm = LLM(str(tmp_path / "llama"), on_step=exporter, max_model_len=64, **settings)
    llm.generate([[6] * 12, [7] * 9], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    totals = llm.stats().counters
    assert value(registry, "spec_decode_num_drafts_total") == totals.drafts > 0
    assert value(registry, "spec_decode_num_draft_tokens_total") == totals.draft_tokens
    accepted = value(registry, "spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= totals.draft_tokens
    assert totals.sampled_tokens == 80
    assert totals.decode_tokens - totals.draft_tokens == 78 - accepted


def test_names_and_labels_are_those_of_vllm(served: tuple[LLM, Any]) -> None:
    """Every metric has a help text and the label model_name; vLLM's names are there with another prefix."""
    _, registry = served
    text = prometheus.generate_latest(registry).decode()
    families = {
        line.split()[2]
        for line in text.splitlines()
        if line.startswith("# HELP") and len(line.split()) > 3
    }
    assert {f"opgraft:{name}" for name in KNOWN.split()} <= families
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('model_name="small"' in line for line in samples)


def test_kernels_are_those_of_explain(served: tuple[LLM, Any]) -> None:
    """Each kernel that runs is one sample, with its provider."""
    llm, registry = served
    (family,) = [each for each in registry.collect() if each.name == "opgraft:kernel_info"]
    shown = {(s.labels["op"], s.labels["kernel"], s.labels["provider"]) for s in family.samples}
    assert shown == {
        (row.op, row.kernel, str(row.provider)) for row in llm.explain().rows if row.runs
    }
