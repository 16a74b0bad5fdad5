"""Boards that were made for vLLM show a server under vLLM's prefix: no panel is empty."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.servers import Server, serving

SELECTED = '{model_name="$model_name"}'
RANGE = f"{SELECTED}[$__rate_interval]"


def latency(name: str) -> list[str]:
    """The queries of a panel with percentiles and a mean."""
    shares = (0.99, 0.95, 0.9, 0.5)
    percentiles = [
        f"histogram_quantile({share}, sum by(le) (rate({name}_bucket{RANGE})))" for share in shares
    ]
    return [*percentiles, f"rate({name}_sum{RANGE})\n/\nrate({name}_count{RANGE})"]


BOARD = {
    "E2E Request Latency": latency("vllm:e2e_request_latency_seconds"),
    "Token Throughput": [
        f"rate(vllm:prompt_tokens_total{RANGE})",
        f"rate(vllm:generation_tokens_total{RANGE})",
    ],
    "Inter Token Latency": latency("vllm:inter_token_latency_seconds"),
    "Scheduler State": [
        f"vllm:num_requests_running{SELECTED}",
        f"vllm:num_requests_waiting{SELECTED}",
    ],
    "Time To First Token Latency": latency("vllm:time_to_first_token_seconds"),
    "Cache Utilization": [f"vllm:kv_cache_usage_perc{SELECTED}"],
    "Request Prompt Length": [f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{RANGE}))"],
    "Request Generation Length": [
        f"sum by(le) (increase(vllm:request_generation_tokens_bucket{RANGE}))"
    ],
    "Finish Reason": [f"sum by(finished_reason) (increase(vllm:request_success_total{RANGE}))"],
    "Queue Time": [f"rate(vllm:request_queue_time_seconds_sum{RANGE})"],
    "Requests Prefill and Decode Time": [
        f"rate(vllm:request_prefill_time_seconds_sum{RANGE})",
        f"rate(vllm:request_decode_time_seconds_sum{RANGE})",
    ],
    "Max Generation Token in Sequence Group": [
        f"rate(vllm:request_max_num_generation_tokens_sum{RANGE})"
    ],
}
"""Panel → queries of vLLM's examples/observability/prometheus_grafana/grafana.json, at 4b5c627c."""

FORMER_BOARD = {
    "Time Per Output Token Latency": latency("vllm:time_per_output_token_seconds"),
    "Former Cache Utilization": [f"vllm:gpu_cache_usage_perc{SELECTED}"],
}
"""Other queries of the board for vLLM up to 0.10.

It was examples/online_serving/prometheus_grafana/grafana.json, at 004f771f.
"""

SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)\{(?P<matchers>[^}]*)\}(?P<range>\[[^\]]+\])?")
MATCHER = re.compile(r'(\w+)="([^"]*)"')
GROUPING = re.compile(r"by\s*\(([^)]*)\)")

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """A server under vLLM's prefix."""
    with serving(checkpoint, "--server.metrics_prefix", "vllm") as running:
        yield running


def read(server: Server) -> Series:
    """Return the value of each series, by name and labels."""
    text = server.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def selected(query: str, model: str, series: Series) -> list[list[tuple[str, frozenset[Any]]]]:
    """Return the series that each selector of a query selects."""
    found = []
    for selector in SELECTOR.finditer(query):
        matchers = {
            (label, value.replace("$model_name", model))
            for label, value in MATCHER.findall(selector["matchers"])
        }
        found.append([key for key in series if key[0] == selector["name"] and matchers <= key[1]])
    return found


def ask(server: Server) -> None:
    """Answer requests that differ, so that every counter and time grows."""
    for prompt in ("the cat sat", "a mat on the cat"):
        answer = server.complete(prompt=prompt, max_tokens=7, ignore_eos=True)
        assert answer.status_code == 200
    assert server.complete(max_tokens=5, n=2, temperature=1, ignore_eos=True).status_code == 200


def test_no_panel_is_empty(server: Server) -> None:
    """Each query of the board selects series that exist and have grown, with the labels it groups by."""
    before = read(server)
    ask(server)
    after = read(server)
    for panel, queries in (*BOARD.items(), *FORMER_BOARD.items()):
        for query in queries:
            groupings = {
                label.strip() for each in GROUPING.findall(query) for label in each.split(",")
            }
            selections = selected(query, server.model, after)
            assert len(selections) == query.count("{"), (panel, query)
            for keys in selections:
                assert keys, (panel, query)
                assert all(groupings <= {label for label, _ in labels} for _, labels in keys)
                if "[" in query:
                    grown = sum(after[key] - before.get(key, 0) for key in keys)
                    assert grown > 0, (panel, query)
    # The variable of the board lists the values of this label.
    models = {value for _, labels in after for label, value in labels if label == "model_name"}
    assert models == {server.model}


def test_parameters_and_times_are_those_of_the_requests(server: Server) -> None:
    """Tokens asked for, answers and the times between tokens are observed, and the cache is told."""
    names = ("request_params_n", "request_params_max_tokens", "request_max_num_generation_tokens")

    def values() -> dict[str, float]:
        series = read(server)
        return {
            name: sum(value for key, value in series.items() if key[0] == f"vllm:{name}")
            for name in (
                *(f"{name}_sum" for name in names),
                "request_generation_tokens_count",
                "inter_token_latency_seconds_count",
                "inter_token_latency_seconds_sum",
                "time_per_output_token_seconds_sum",
                "request_decode_time_seconds_sum",
            )
        }

    before = values()
    ask(server)
    grown = {name: value - before[name] for name, value in values().items()}
    assert [grown[f"{name}_sum"] for name in names] == [1 + 1 + 2, 7 + 7 + 5, 7 + 7 + 5]
    assert grown["request_generation_tokens_count"] == 4
    # The second answer of a request may begin a step after the first.
    assert grown["inter_token_latency_seconds_count"] - (6 + 6) in (4, 5)
    between = grown["inter_token_latency_seconds_sum"]
    assert between == pytest.approx(grown["request_decode_time_seconds_sum"])
    assert between == pytest.approx(grown["time_per_output_token_seconds_sum"])
    [(_, labels)] = [key for key in read(server) if key[0] == "vllm:cache_config_info"]
    told = {
        "engine": "0",
        "model_name": server.model,
        "block_size": "4",
        "num_gpu_blocks": "256",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
    }
    assert dict(labels) == told
