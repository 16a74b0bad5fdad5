"""``opgraft plugins``: what is installed, how far each plugin came, and what is wrong."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click
from opgraft.cli.output import json_option, print_json, print_table, print_wrapped, with_settings
from opgraft.errors import InputError, OpgraftError, PluginError, close_matches
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, Offer, discover
from opgraft.plugins.requirements import objection
from opgraft.state import PluginRecord, PluginStatus, host_state


@click.group("plugins")
def command() -> None:
    """Installed plugins and what became of them."""


@command.command("list")
@json_option
@with_settings
def list_plugins(as_json: bool) -> None:
    """Platforms and plugins that are installed, and whether the settings select them; imports none of them."""
    config = host_state().settings().config
    rows = []
    for offer in _offers():
        against = objection(offer, config)
        admitted = "selected" if offer.group == PLUGIN_GROUP else "eligible"
        rows.append({**_offer(offer), "status": "rejected" if against else admitted, "reason": against or ""})
    if as_json:
        print_json("opgraft.plugins.list/1", {"offers": rows, "problems": _problems()})
        return
    header = ("kind", "name", "provider", "status", "reason")
    print_table(header, ([row[column] for column in header] for row in rows))
    for problem in _problems():
        print_wrapped(f"ignored: {problem}")


@command.command("show")
@click.argument("name")
@json_option
@with_settings
def show(name: str, as_json: bool) -> None:
    """Load the plugins and show the plugin or platform NAME: status, reason, registrations, traceback."""
    offers = [offer for offer in _offers() if offer.answers_to(name)]
    if not offers:
        known = {offer.name for offer in _offers()}
        raise InputError(f"no installed plugin or platform is called {name!r}: {close_matches(name, known)}")
    error = _load()
    shown = [_details(offer) for offer in offers]
    if as_json:
        print_json("opgraft.plugins.show/1", {"offers": shown, "error": error and str(error)})
    for details in shown if not as_json else ():
        for key, value in details.items():
            text = ", ".join(value) if isinstance(value, list) else str(value if value is not None else "")
            print_wrapped(f"{key}: {text}" if key != "traceback" else text)
        echo()
    if error is not None:
        raise error


@command.command("doctor")
@json_option
@with_settings
def doctor(as_json: bool) -> None:
    """Load everything and report what is wrong. Exit code 1: findings, 3: no platform, 4: a plugin failed."""
    error = _load()
    findings = [*_problems(), *host_state().platform_failures, *_unknown_names()]
    code = 1 if findings else 0
    for record in host_state().plugins.values():
        if record.status is PluginStatus.REJECTED and record.reason.startswith("it requires"):
            findings.append(f"plugin {record.name} of {record.provider} is not used: {record.reason}")
            code = code or 1
        if record.status is PluginStatus.FAILED:
            findings.append(f"plugin {record.name} of {record.provider} failed {record.reason}")
            code = 4
    if error is not None:
        findings.append(str(error))
        code = error.exit_code
    else:
        without_effect = [*_conflicts(), *_never_used()]
        findings += without_effect
        code = code or (1 if without_effect else 0)
    rows = [_record(record) for record in host_state().plugins.values()]
    if as_json:
        print_json("opgraft.plugins.doctor/1", {"plugins": rows, "findings": findings})
    else:
        for row in rows:
            print_wrapped(
                f"{row['name']} ({row['provider']}): {row['status']}{': ' if row['reason'] else ''}{row['reason']}"
            )
        for finding in findings:
            print_wrapped(f"finding: {finding}")
        if not findings:
            active = sum(row["status"] == PluginStatus.ACTIVATED.value for row in rows)
            echo(f"{active} of {len(rows)} plugins active, nothing wrong")
    sys.exit(code)


def _load() -> OpgraftError | None:
    """Load the plugins with the whole catalogue known; returns what went wrong instead of raising it."""
    from opgraft.plugins.host import load_plugins

    try:
        importlib.import_module("opgraft.ops")
    except Exception as error:  # torch reads the metadata of every distribution when it is imported
        return PluginError(
            f"torch cannot be imported here: {error!r}. If a device backend or malformed metadata is the cause, "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 goes without backends that load themselves."
        )
    try:
        load_plugins()
    except OpgraftError as error:
        return error
    return None


def _conflicts() -> list[str]:
    """Ops for which no choice can be made here, each with the error that constructing them would raise."""
    from opgraft.binding import bind

    found = []
    for cls in {r.target for r in host_state().active if r.target} | {
        r.cls for r in host_state().registry.ops.values()
    }:
        try:
            bind(cls)
        except OpgraftError as error:
            found.append(str(error))
    return sorted(set(found))


def _never_used() -> list[str]:
    """Active replacements that are not what constructing their target yields here, with the reason."""
    from opgraft.binding import bind

    found = []
    for replacement in host_state().active:
        try:
            choice = bind(replacement.target).replacement if replacement.target else None
        except OpgraftError:
            continue  # a conflict, which is a finding of its own
        if choice and choice.winner is not replacement:
            row = next(c for c in choice.decision.candidates if c.location == replacement.location)
            found.append(f"{row.name} at {row.location} ({row.provider}) is never used: {row.reason}")
    return found


def _unknown_names() -> list[str]:
    """Names on the deny list that no installed distribution answers to."""
    names = host_state().settings().config.plugins_disable or ()
    known = {offer.name for offer in _offers()}
    unknown = [name for name in names if not any(offer.answers_to(name) for offer in _offers())]
    return [f"the deny list names {name!r}, which is not installed: {close_matches(name, known)}" for name in unknown]


def _problems() -> list[str]:
    return [f"{problem.provider}: {problem.reason}" for problem in discover().problems]


def _offers() -> list[Offer]:
    return [offer for offer in discover().offers if offer.group in (PLATFORM_GROUP, PLUGIN_GROUP)]


def _offer(offer: Offer) -> dict[str, Any]:
    kind = {PLATFORM_GROUP: "platform", PLUGIN_GROUP: "plugin"}[offer.group]
    return {"kind": kind, "name": offer.name, "provider": str(offer.provider), "entry point": offer.value}


def _record(record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "provider": str(record.provider),
        "status": record.status.value,
        "reason": record.reason,
    }


def _details(offer: Offer) -> dict[str, Any]:
    details = {**_offer(offer), "requires": list(offer.requires)}
    record = host_state().plugins.get(offer.name) if offer.group == PLUGIN_GROUP else None
    if record is None:
        return details
    declared = [r for r in host_state().registry.replacements if r.plugin == record.name]
    return {
        **details,
        "status": record.status.value,
        "reason": record.reason,
        "platforms": list(record.platforms),
        "replacements": [f"{r.asked_for} -> {r.cls.__qualname__} at {r.location}" for r in declared],
        "traceback": record.traceback,
    }
