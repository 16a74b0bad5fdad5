"""A picture of a load test: throughput, and latencies with percentiles, over the loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from opgraft.bench.report import LATENCIES, PERCENTILES, Report

_DOTS_PER_INCH = 150


def draw(reports: Sequence[Report], title: str, file: Path) -> None:
    """Write a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(12, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 3).flat
    places = range(len(reports))
    _bars(axes[0], "output tokens/s", [each.output_tokens_per_second for each in reports])
    _bars(axes[1], "goodput, requests/s", [each.goodput for each in reports])
    for axis, (name, heading) in zip(axes[2:], LATENCIES.items(), strict=True):
        axis.set_title(f"{heading}, ms")
        for percent in PERCENTILES:
            spreads = [getattr(each, name) for each in reports]
            values = [
                getattr(spread, f"p{percent}") * 1e3 if spread else float("nan")
                for spread in spreads
            ]
            axis.plot(places, values, marker="o", label=f"p{percent}")
        axis.legend()
    for axis in axes:
        axis.set_xticks(
            places, [each.load for each in reports], rotation=20 if len(reports) > 2 else 0
        )
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)


def _bars(axis: Any, title: str, values: Sequence[float]) -> None:
    axis.set_title(title)
    axis.bar(range(len(values)), values, width=0.5)
