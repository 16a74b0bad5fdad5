"""``opgraft ops``: the catalogue, and which kernel an op gets here and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click
from opgraft import inventory
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
    """Every registered op: its kernel here and on each platform, and what was proved of its native definition.

    Exit code 1: an op has a conflict.
    """
    load_plugins()
    platforms = inventory.declared_platforms()
    rows = [_row(name, platforms) for name in sorted(CustomOp.op_registry)]
    unknown = {platform.name: platform.unknown for platform in platforms if platform.unknown}
    if as_json:
        print_json("opgraft.ops.list/1", {"platform": current_platform().name, "ops": rows, "unknown": unknown})
    else:
        echo(f"platform: {current_platform().name}")
        header = ("op", "kernel here; kernels per platform; evidence of the native definition")
        print_table(header, (line for row in rows for line in _in_words(row)))
        for name, reason in unknown.items():
            print_wrapped(f"{name}=?: {reason}")
    if any(row["error"] for row in rows):
        sys.exit(1)


@command.command("explain")
@click.argument("name")
@json_option
@with_settings
def explain(name: str, as_json: bool) -> None:
    """Which kernel an op gets: candidates, winner, reasons, file:line, and the setting that would change it.

    NAME is that of an op, of its class or of a functional form.
    """
    load_plugins()
    target = inventory.find_op(name)
    if target is None:
        raise InputError(f"no op is called {name!r}: {close_matches(name, inventory.known_names())}")
    binding = bind(target)
    forms = inventory.functions_of(target, binding.kernel.winner)
    packages = inventory.missing_packages(target)
    if as_json:
        decision = binding.decision.to_dict()
        print_json("opgraft.ops.explain/1", {"decision": decision, "forms": forms, "not_installed": packages})
        return
    print_wrapped(str(binding.decision))
    for form, function in forms.items():
        print_wrapped(f"  opgraft.functional.{form} runs {function}")
    for replacement in host_state().registry.replacements:
        if replacement.target is target and replacement not in host_state().active:
            print_wrapped(f"  declared but not active: {replacement.cls.__qualname__} at {replacement.location}")
    for package in packages:
        print_wrapped(f"  not installed: {package} has kernels for this op on this platform")


def _row(name: str, platforms: list[inventory.DeclaredPlatform]) -> dict[str, Any]:
    cls = CustomOp.op_registry[name]
    forms = inventory.forms_of(cls)
    return {
        "op": name,
        "class": cls.__name__,
        **_kernel_here(cls),
        "kernels": inventory.kernel_keys(cls, platforms),
        "forms": [form.name for form in forms],
        "evidence": inventory.evidence_of(forms),
    }


def _kernel_here(cls: type) -> dict[str, Any]:
    try:
        binding = bind(cls)
    except ConflictError as error:
        return {"kernel": None, "provider": None, "enabled": None, "error": str(error)}
    kernel, provider = str(binding.kernel.winner), str(binding.replacement.provider)
    return {"kernel": kernel, "provider": provider, "enabled": binding.kernel.enabled, "error": None}


def _in_words(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if row["error"]:
        yield row["op"], f"conflict: {row['error']}"
    else:
        yield row["op"], f"{row['kernel']} of {row['provider']}{'' if row['enabled'] else ', disabled'}"
    yield "", inventory.keys_in_words(row["kernels"])
    yield "", inventory.evidence_in_words(CustomOp.op_registry[row["op"]], row["evidence"])
