"""``opgraft trace``: record steps of a model for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click
from opgraft.cli.output import (
    COMMAND_LINE,
    GivenPath,
    SettingsCommand,
    json_option,
    with_model_settings,
)
from opgraft.config.checkpoints import find_checkpoint
from opgraft.registry.state import host_state

_STEPS = 8
_MOST_STEPS = 1000
"""The events of all steps are in memory at once."""


@click.command("trace", cls=SettingsCommand)
@click.argument("model")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--perfetto",
    "file",
    metavar="FILE",
    type=GivenPath(dir_okay=False, path_type=Path),
    required=True,
    help="To write, for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, _MOST_STEPS),
    default=_STEPS,
    show_default=True,
    help="To record.",
)
@json_option
@with_model_settings
def command(model: str, prompts: tuple[str, ...], file: Path, steps: int, as_json: bool) -> None:
    """Record steps of the engine that answers PROMPTS with MODEL, with the kernel of each op.

    The first step computes the prompts. Each later one computes a token of each answer.
    """
    if host_state().settings().origins["model.name"] == COMMAND_LINE:
        raise click.UsageError("MODEL names the model: leave --model.name out")
    find_checkpoint(model)
    # Imports torch, which --help does without.
    from opgraft.cli.recorded_trace import record_trace

    record_trace(model, prompts, file, steps, as_json=as_json)
