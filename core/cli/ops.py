"""``opgraft ops``: the catalogue, and which kernel an op gets here and why."""

from __future__ import annotations

import sys
from typing import Any

import click
from opgraft.binding import bind
from opgraft.cli.output import json_option, print_json, print_table, print_wrapped, with_settings
from opgraft.errors import ConflictError, InputError, close_matches
from opgraft.ops import CustomOp
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.state import host_state


@click.group("ops")
def command() -> None:
    """The op catalogue, and which kernel an op gets."""


@command.command("list")
@json_option
@with_settings
def list_ops(as_json: bool) -> None:
    """Every registered op with the kernel that it gets on this platform. Exit code 1: an op has a conflict."""
    load_plugins()
    rows = [_row(name) for name in sorted(CustomOp.op_registry)]
    if as_json:
        print_json("opgraft.ops.list/1", {"platform": current_platform().name, "ops": rows})
    else:
        click.echo(f"platform: {current_platform().name}")
        print_table(("op", "kernel"), ((row["op"], _in_words(row)) for row in rows))
    if any(row["error"] for row in rows):
        sys.exit(1)


@command.command("explain")
@click.argument("name")
@json_option
@with_settings
def explain(name: str, as_json: bool) -> None:
    """Which kernel the op NAME gets: candidates, winner, reasons, file:line, and the setting that would change it."""
    load_plugins()
    registry = host_state().registry
    target = registry.find_target(name)
    if target is None:
        raise InputError(f"no op is called {name!r}: {close_matches(name, registry.target_names())}")
    decision = bind(target).decision
    if as_json:
        print_json("opgraft.ops.explain/1", {"decision": decision.to_dict()})
        return
    print_wrapped(str(decision))
    for replacement in registry.replacements:
        if replacement.target is target and replacement not in host_state().active:
            print_wrapped(f"  declared but not active: {replacement.cls.__qualname__} at {replacement.location}")


def _row(name: str) -> dict[str, Any]:
    row = {"op": name, "class": CustomOp.op_registry[name].__name__}
    try:
        binding = bind(CustomOp.op_registry[name])
    except ConflictError as error:
        return {**row, "kernel": None, "provider": None, "enabled": None, "error": str(error)}
    kernel, provider = str(binding.kernel.winner), str(binding.replacement.provider)
    return {**row, "kernel": kernel, "provider": provider, "enabled": binding.kernel.enabled, "error": None}


def _in_words(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"conflict: {row['error']}"
    return f"{row['kernel']} of {row['provider']}{'' if row['enabled'] else ', disabled'}"
