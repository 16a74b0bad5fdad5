"""``opgraft verify``: compare a model op by op with the model on native definitions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from opgraft.cli.output import (
    COMMAND_LINE,
    GivenPath,
    SettingsCommand,
    json_option,
    print_json,
    print_table,
    print_wrapped,
    with_model_settings,
)
from opgraft.config.checkpoints import find_checkpoint, is_there
from opgraft.plugins.selection import selected_platform
from opgraft.registry.state import host_state

if TYPE_CHECKING:
    from opgraft.testing.verification import ComparedModule, Departure, Verification

_WHOLE = "(model)"


@click.command("verify", cls=SettingsCommand)
@click.argument("model")
@click.argument("prompt", required=False)
@click.option(
    "--graft",
    "as_graft",
    is_flag=True,
    help="Take the model's own class in transformers, and graft it.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2),
    default=16,
    show_default=True,
    help="Random ones, without PROMPT.",
)
@click.option(
    "--save",
    "folder",
    metavar="FOLDER",
    type=GivenPath(path_type=Path, file_okay=False),
    default=Path("opgraft-verify"),
    show_default=True,
    help="Where the script goes that makes the call again.",
)
@json_option
@with_model_settings
def command(
    model: str, prompt: str | None, as_graft: bool, tokens: int, folder: Path, as_json: bool
) -> None:
    """Compare each op of MODEL with its native definition, and name the first op that departs.

    Both get the same inputs. MODEL is a model as for 'opgraft run', or module:function. The
    function returns a PyTorch model and the arguments of a call. Exit code 1: a result left its
    tolerance. The call is then written to --save, with a script that repeats the call.
    """
    if host_state().settings().origins["model.name"] == COMMAND_LINE:
        raise click.UsageError("MODEL names the model: leave --model.name out")
    made = is_function(model)
    if made and (prompt is not None or as_graft):
        message = f"{model} makes a model and its inputs: leave PROMPT and --graft out"
        raise click.UsageError(message)
    if not made:
        find_checkpoint(model)
    # These import torch, which --help does without.
    from opgraft.binding.provenance import kernels_told_when_late
    from opgraft.cli.verified_models import as_it_runs, grafted, made_by
    from opgraft.testing.reproduction import write_case
    from opgraft.testing.verification import verify

    with kernels_told_when_late():
        if made:
            pair = made_by(model)
        elif as_graft:
            pair = grafted(model, prompt, tokens)
        else:
            pair = as_it_runs(model, prompt, tokens)
        found = verify(pair.native, pair.grafted, pair.steps)
    script = write_case(found.departure, folder, model, pair.paths) if found.departure else None
    if as_json:
        _print_as_json(model, found, script)
    else:
        _print_as_text(found, script)
    sys.exit(1 if found.departure else 0)


def is_function(model: str) -> bool:
    """Return True for ``module:function``, unless a file has the name."""
    module, colon, function = model.partition(":")
    names = [*module.split("."), function]
    if not colon or not all(name.isidentifier() for name in names):
        return False
    return not is_there(model)


def _print_as_json(model: str, found: Verification, script: Path | None) -> None:
    departure = None
    if found.departure:
        inputs = list(found.departure.inputs)
        departure = {**_module_row(found.departure.place), "inputs": inputs, "script": str(script)}
    data = {
        "model": model,
        "platform": selected_platform().platform.name,
        "places": [_module_row(place) for place in found.places],
        "unreached": list(found.unreached),
        "departure": departure,
    }
    print_json("opgraft.verify/1", data)


def _module_row(place: ComparedModule) -> dict[str, Any]:
    served = [{**asdict(each), "provider": each.provider.to_dict()} for each in place.served]
    return {
        "path": place.path,
        "ops": served,
        "calls": place.calls,
        "error": place.error,
        "reason": place.reason,
    }


def _print_as_text(found: Verification, script: Path | None) -> None:
    # Layers of one kind run the same kernels, and share a row.
    grouped: dict[str, list[ComparedModule]] = {}
    for place in found.places:
        grouped.setdefault(_kernels(place), []).append(place)
    rows = [(len(places), name, _worst(places), _state(places)) for name, places in grouped.items()]
    print_table(("modules", "op", "largest error", "result"), rows)
    if found.unreached:
        listed = ", ".join(found.unreached)
        print_wrapped(f"not compared, as the native model calls nothing there: {listed}")
    if found.departure:
        _print_departure(found.departure, script)


def _kernels(place: ComparedModule) -> str:
    told = dict.fromkeys(f"{each.op} by {each.kernel} of {each.provider}" for each in place.served)
    return "; ".join(told) or "what the whole model returns"


def _worst(places: Sequence[ComparedModule]) -> str:
    errors = [place.error for place in places]
    numbers = [error for error in errors if error is not None]
    # A result of another shape has no error in numbers.
    if len(numbers) < len(errors):
        return "?"
    return f"{max(numbers):.2g}"


def _state(places: Sequence[ComparedModule]) -> str:
    departed = sum(bool(place.reason) for place in places)
    return f"{departed} left their tolerance" if departed else "within tolerance"


def _print_departure(departure: Departure, script: Path | None) -> None:
    place = departure.place
    print_wrapped(f"first departure: {place.path or _WHOLE}: {_kernels(place)}")
    print_wrapped([f"at {each.location}" for each in place.served], indent="  ")
    print_wrapped(place.reason, indent="  ")
    print_wrapped([f"called with {line}" for line in departure.inputs], indent="  ")
    print_wrapped(f"to make that call again: python {script}", indent="  ")
