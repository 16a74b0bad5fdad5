"""``opgraft plan``: the splits of a model over devices."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from opgraft.cli.output import (
    SettingsCommand,
    echo,
    json_option,
    print_json,
    print_table,
    print_wrapped,
    with_model_settings,
)
from opgraft.config.checkpoints import find_checkpoint
from opgraft.engine.planning.devices import device_of
from opgraft.engine.planning.units import in_bytes, in_seconds, parse_quantity
from opgraft.machine.device_figures import DeviceFigures

if TYPE_CHECKING:
    from opgraft.engine.planning.splits import Fitting, PlanRequest, RefusedSplit

_FIGURES = {
    "memory": ("bytes", "of each device, such as 80GiB"),
    "bandwidth": ("bytes per second", "of its memory, such as 3.35TB/s"),
    "flops": ("operations per second", "at most, such as 989TFLOPS; unlimited if not known"),
    "link": ("bytes per second", "to the devices of the same host, such as 450GB/s"),
    "latency": ("seconds", "of that link, such as 3us"),
    "network": ("bytes per second", "to those of other hosts, such as 50GB/s"),
    "network_latency": ("seconds", "of the network, such as 10us"),
    "layer_seconds": ("seconds", "of each layer beside reading and computing, such as 20us"),
}
"""Options that describe a device: the kind of quantity, and help."""

_SIZES = ("tensor", "pipeline", "data", "expert")


def _with_figures(command: Any) -> Any:
    for name, (_, text) in reversed(_FIGURES.items()):
        option = click.option(f"--{name.replace('_', '-')}", name, metavar="QUANTITY", help=text)
        command = option(command)
    return command


def _with_sizes(command: Any) -> Any:
    for name in reversed(_SIZES):
        text = f"Only splits with parallel.{name} of this size."
        option = click.option(f"--{name}", type=click.IntRange(1), help=text)
        command = option(command)
    return command


@click.command("plan", cls=SettingsCommand)
@click.argument("model")
@click.option("--devices", type=click.IntRange(1, 4096), required=True, help="How many there are.")
@click.option(
    "--device", metavar="NAME", help="A device whose figures are known, such as h100 or v5e."
)
@_with_figures
@click.option(
    "--linked", type=click.IntRange(1), help="Devices of a host [default: 8, or as known]."
)
@_with_sizes
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Sequences that run at once.",
)
@click.option(
    "--context", type=click.IntRange(1), default=4096, show_default=True, help="Tokens of each."
)
@json_option
@with_model_settings
def command(
    model: str,
    devices: int,
    device: str | None,
    batch: int,
    context: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Say how MODEL may be split over devices, and how fast it is at best.

    Prints the splits that fit, with the bytes that each rank holds and sends, and the reasons
    against other splits. MODEL is as for 'opgraft run'. In a folder, config.json is enough. Exit
    code 1: no split fits.
    """
    given = {}
    for name, (kind, _) in _FIGURES.items():
        if options[name] is not None:
            option = f"--{name.replace('_', '-')}"
            given[name] = parse_quantity(options[name], kind, option)
    if options["linked"] is not None:
        given["linked"] = options["linked"]
    figures = device_of(device, given)
    find_checkpoint(model)
    # These import torch, which --help does without.
    from opgraft.engine.planning.splits import Planner, PlanRequest
    from opgraft.serving.engine_settings import engine_config

    fixed = {name: options[name] for name in _SIZES if options[name] is not None}
    wanted = PlanRequest(devices, batch, context, fixed)
    planner = Planner(engine_config(model, None, {}).resolved(), figures)
    fitting, refused = planner.plan(wanted)
    # A search over many numbers of devices, for advice alone.
    least = None if fitting else planner.least_devices(wanted)
    if as_json:
        _print_as_json(model, figures, wanted, fitting, refused, least)
    else:
        _print_as_text(figures, wanted, fitting, refused)
    if not fitting:
        click.echo(_none_fits(wanted, least), err=True)
        sys.exit(1)


def _none_fits(wanted: PlanRequest, least: int | None) -> str:
    step = "give devices with more memory, a smaller --context or --batch, or a quantization"
    if least is not None:
        step = f"the least number on which one fits is {least}: give --devices {least}, or {step}"
    return f"no split over {wanted.devices} devices fits, for the reasons above: {step}"


def _print_as_text(
    figures: DeviceFigures,
    wanted: PlanRequest,
    fitting: Sequence[Fitting],
    refused: Sequence[RefusedSplit],
) -> None:
    bandwidth = f"{figures.bandwidth / 1e12:.4g} TB/s"
    print_wrapped(
        f"{wanted.devices} devices ({figures.name}: {in_bytes(figures.memory)}, {bandwidth}), "
        f"{wanted.batch} sequences of {wanted.context} tokens"
    )
    if fitting:
        header = ("split", "weights", "cache tokens", "sent per token", "step", "tokens/s")
        print_table(header, [_cells(row) for row in fitting])
    if refused:
        echo()
        # Splits with the same reason share a row.
        reasons: dict[str, list[str]] = {}
        for row in refused:
            reasons.setdefault(row.reason, []).append(row.name)
        rows = [("; ".join(names), reason) for reason, names in reasons.items()]
        print_table(("does not fit", "why"), rows)


def _cells(row: Fitting) -> tuple[str, ...]:
    sent = sum(row.sent.values()) / row.batch
    return (
        row.name,
        in_bytes(row.weight_bytes),
        f"{row.cache_tokens:,}",
        in_bytes(sent) if sent else "-",
        in_seconds(row.step),
        f"{row.tokens_per_second:,.4g}",
    )


def _print_as_json(
    model: str,
    figures: DeviceFigures,
    wanted: PlanRequest,
    fitting: Sequence[Fitting],
    refused: Sequence[RefusedSplit],
    least: int | None,
) -> None:
    data = {
        "model": model,
        "device": dataclasses.asdict(figures),
        "devices": wanted.devices,
        "batch": wanted.batch,
        "context": wanted.context,
        "splits": [_fitting_as_dict(row) for row in fitting],
        "refused": [{**_sizes(row), "reason": row.reason} for row in refused],
        "least_devices": least,
    }
    print_json("opgraft.plan/1", data)


def _fitting_as_dict(row: Fitting) -> dict[str, Any]:
    return {
        **_sizes(row),
        "weight_bytes": row.weight_bytes,
        "cache_tokens": row.cache_tokens,
        "sent_bytes_per_step": row.sent,
        "sent_bytes_per_token": {kind: nbytes / row.batch for kind, nbytes in row.sent.items()},
        "stages": [dataclasses.asdict(stage) for stage in row.stages],
        "step_seconds": row.step,
        "tokens_per_second": row.tokens_per_second,
    }


def _sizes(row: Fitting | RefusedSplit) -> dict[str, int]:
    return {**dataclasses.asdict(row.layout), "expert": row.expert}
