"""``opgraft plugins show``: one plugin or platform, and how far it came."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click
from opgraft.cli.completion import offer_names
from opgraft.cli.isolation import isolated
from opgraft.cli.loading import load_all
from opgraft.cli.offers import as_dict, misspelt_groups, problem_lines, shown_offers
from opgraft.cli.output import SettingsCommand, echo, json_option, print_json, print_wrapped, with_settings
from opgraft.cli.plugins_doctor import found
from opgraft.errors import InputError, close_matches
from opgraft.finding import Finding
from opgraft.plugins.discovery import PLUGIN_GROUP, Offer
from opgraft.plugins.outcomes import replacements_of
from opgraft.state import host_state
from opgraft.text import printable


@click.command("show", cls=SettingsCommand)
@click.argument("name", shell_complete=offer_names)
@json_option
@with_settings
def command(name: str, as_json: bool) -> None:
    """Load the plugins and show one of them.

    NAME is that of a plugin, a platform or a distribution. Shown are its status and the reason, its registrations, and
    the traceback if it failed.
    """
    offers = [offer for offer in shown_offers() if offer.answers_to(name)]
    if not offers:
        known = {offer.name for offer in shown_offers()}
        ignored = "".join(f" {line}" for line in problem_lines(misspelt_groups()))
        raise InputError(
            f"no installed plugin or platform is called {name!r}: {close_matches(name, known)}{ignored} "
            "'opgraft plugins doctor' tells what keeps an installed one from being found."
        )
    outcome = isolated(__name__, "examine", name)
    report = outcome.result
    if outcome.crash:
        report = _report([_installed(offer) for offer in offers], [], outcome.crash)
    exit_code = report.pop("exit_code")
    if as_json:
        print_json("opgraft.plugins.show/2", report)
    else:
        for details in report["offers"]:
            _print_details(details)
        for finding in report["findings"]:
            print_wrapped(f"finding: {Finding.from_dict(finding)}")
    if report["error"]:
        click.echo(f"error: {printable(report['error'])}", err=True)
    sys.exit(exit_code)


def examine(name: str) -> dict[str, Any]:
    """Load everything in this process; returns what is installed under a name, and what is wrong, as plain data."""
    error = load_all()
    offers = [offer for offer in shown_offers() if offer.answers_to(name)]
    findings = _findings(offers, loaded=error is None)
    details = [_details(offer) for offer in offers]
    return _report(details, findings, Finding(str(error), exit_code=error.exit_code) if error else None)


def _report(offers: list[dict[str, Any]], findings: list[Finding], error: Finding | None) -> dict[str, Any]:
    return {
        "offers": offers,
        "findings": [finding.to_dict() for finding in findings],
        "error": error and error.message,
        "exit_code": max((finding.exit_code for finding in (*findings, error) if finding), default=0),
    }


def _findings(offers: Sequence[Offer], *, loaded: bool) -> list[Finding]:
    """List what the doctor finds about these plugins and platforms, and about the distributions that offer them."""
    names = {offer.name for offer in offers if offer.group == PLUGIN_GROUP}
    records = [record for name, record in host_state().plugins.items() if name in names]
    providers = {offer.provider for offer in offers}
    return [finding for finding in found(records, loaded=loaded) if finding.concerns(providers)]


def _print_details(details: dict[str, Any]) -> None:
    for key, value in details.items():
        if key == "traceback":
            print_wrapped((value or "").splitlines(), indent="  | ")  # which no line of it can forge
        elif value:
            print_wrapped(f"{key.replace('_', ' ')}: {_in_words(value)}")
    echo()


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['name']} {value['version']}"
    if isinstance(value, list):
        return ", ".join(_replacement(item) if isinstance(item, dict) else item for item in value)
    return str(value)


def _replacement(row: dict[str, Any]) -> str:
    return f"{row['target']} -> {row['class']} at {row['location']}{'' if row['active'] else ' (not active)'}"


def _installed(offer: Offer) -> dict[str, Any]:
    return {**as_dict(offer), "requires": list(offer.requires)}


def _details(offer: Offer) -> dict[str, Any]:
    details = _installed(offer)
    record = host_state().plugins.get(offer.name) if offer.group == PLUGIN_GROUP else None
    if record is None:
        return details
    rows = replacements_of(record)
    return {
        **details,
        "status": record.status.value,
        "reason": record.reason,
        "platforms": list(record.platforms),
        "replacements": [
            {
                "target": row.asked_for,
                "class": row.cls.__qualname__,
                "location": row.location,
                "active": row in host_state().active,
            }
            for row in rows
        ],
        "traceback": record.traceback,
    }
