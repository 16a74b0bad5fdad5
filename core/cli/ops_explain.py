"""``opgraft ops explain``: which kernel an op gets here, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
from opgraft.binding.names import op_name_of
from opgraft.cli.completion import op_names
from opgraft.cli.output import (
    SettingsCommand,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.errors import InputError, near_matches
from opgraft.ops import CustomOp
from opgraft.plugins.host import load_plugins
from opgraft.registry.declarations import Replacement
from opgraft.registry.state import PluginStatus, host_state
from opgraft.testing import inventory

_ALL_NAMES = "'opgraft ops list' shows the names of all."


@click.command("explain", cls=SettingsCommand)
@click.argument("name", shell_complete=op_names)
@json_option
@with_settings
def command(name: str, as_json: bool) -> None:
    """Explain which kernel an op gets here, and why.

    Shown are candidates, winner, reasons, file:line, and the setting that would change it. NAME is that of an op, of a
    class, of a replacement, of a kernel such as RMSNorm.forward_native, or of a functional form.
    """
    load_plugins()
    target = inventory.find_op(name)
    if target is None:
        raise InputError(_unknown(name))
    decision = inventory.decision_here(target)
    variants = inventory.variants_of(target) if target in CustomOp.op_registry.values() else []
    here = {cls.__qualname__: inventory.kernel_here(cls) for cls in variants}
    forms, inactive = inventory.forms_here(target), _inactive(target)
    packages = inventory.missing_packages(target)
    if as_json:
        data = {
            "op": op_name_of(target, host_state()),
            "target": target.__qualname__,
            "decision": decision.to_dict(),
            "variants": [{"target": variant, **row.to_dict()} for variant, row in here.items()],
            "forms": [dataclasses.asdict(form) for form in forms],
            "inactive": [_as_dict(replacement) for replacement in inactive],
            "not_installed": packages,
        }
        print_json("opgraft.ops.explain/2", data)
        return
    print_wrapped(decision.lines())
    for variant, row in here.items():
        runs = row.error or f"{row.kernel} of {row.provider}{'' if row.enabled else ', disabled'}"
        print_wrapped(f"  the variant {variant} gets {runs}")
    for form in forms:
        print_wrapped(f"  {form.call} runs {form.function} at {form.location}")
    for replacement in inactive:
        print_wrapped(
            f"  declared but not active: {replacement.cls.__qualname__} at {replacement.location}"
        )
    for package in packages:
        print_wrapped(f"  not installed: {package} has kernels for this op on this platform")


def _unknown(name: str) -> str:
    """Describe a name that nothing answers to; a class of a plugin that was not imported has a name nobody knows."""
    near = " or ".join(map(repr, near_matches(name, inventory.known_names())))
    records = [r for r in host_state().plugins.values() if r.status is not PluginStatus.ACTIVATED]
    unread = "; ".join(
        f"plugin {r.name} of {r.provider} is {r.status.value}: {r.reason}" for r in records
    )
    hint = f" Classes of plugins that are not active are not known: {unread}." if unread else ""
    doctor = " 'opgraft plugins doctor' checks the plugins." if unread else ""
    return f"no op is called {name!r}: {f'did you mean {near}? ' if near else ''}{_ALL_NAMES}{hint}{doctor}"


def _inactive(target: type) -> list[Replacement]:
    """Find replacements that modules have declared, of plugins that are not active."""
    state = host_state()
    return [r for r in state.registry.replacements if r.target is target and r not in state.active]


def _as_dict(replacement: Replacement) -> dict[str, Any]:
    provider = replacement.provider.to_dict()
    return {
        "class": replacement.cls.__qualname__,
        "provider": provider,
        "location": replacement.location,
    }
