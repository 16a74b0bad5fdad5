"""``opgraft plugins doctor``: load everything, and report what is wrong."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
from opgraft.cli.isolation import isolated
from opgraft.cli.loading import load_all
from opgraft.cli.offers import misspelt_groups, shown_offers
from opgraft.cli.output import echo, json_option, print_json, print_wrapped, with_settings
from opgraft.decision import Provider
from opgraft.errors import close_matches
from opgraft.finding import Finding
from opgraft.plugins.discovery import discover
from opgraft.plugins.outcomes import findings_of
from opgraft.state import PluginRecord, PluginStatus, host_state


@click.command("doctor")
@json_option
@with_settings
def command(as_json: bool) -> None:
    """Load everything and report what is wrong.

    Exit codes: 1 findings, 2 a setting that cannot be used, 3 no platform, 4 a plugin failed. Everything is loaded in
    a child process, so that a plugin that ends or crashes its process is reported, too.
    """
    examined = isolated(__name__, "examine")
    report = {"plugins": [], "findings": [examined.crash.to_dict()]} if examined.crash else examined.result
    if as_json:
        print_json("opgraft.plugins.doctor/2", report)
    else:
        _print(report)
    sys.exit(max((finding["exit_code"] for finding in report["findings"]), default=0))


def _print(report: Mapping[str, Any]) -> None:
    for row in report["plugins"]:
        told_below = any(row["reason"] in finding["message"] for finding in report["findings"])
        reason = f": {row['reason']}" if row["reason"] and not told_below else ""
        print_wrapped(f"{row['name']} ({_in_words(row['provider'])}): {row['status']}{reason}")
    for finding in report["findings"]:
        print_wrapped(f"finding: {Finding.from_dict(finding)}")
    if not report["findings"]:
        active = sum(row["status"] == PluginStatus.ACTIVATED.value for row in report["plugins"])
        echo(f"{active} of {len(report['plugins'])} plugins active, nothing wrong")


def _in_words(provider: Mapping[str, Any]) -> str:
    return str(Provider(**provider))


def examine() -> dict[str, Any]:
    """Load everything in this process; returns the plugins and the findings as plain data."""
    error = load_all()
    outcomes = [finding for record in host_state().plugins.values() for finding in findings_of(record)]
    findings = [*_metadata(), *host_state().platform_failures, *outcomes]
    if error is not None:
        if str(error) not in {finding.message for finding in outcomes}:  # in strict mode it is one plugin's failure
            findings.append(Finding(str(error), exit_code=error.exit_code))
    else:
        findings += importlib.import_module("opgraft.testing.diagnosis").diagnose()
    plugins = [_as_dict(record) for record in host_state().plugins.values()]
    return {"plugins": plugins, "findings": [finding.to_dict() for finding in dict.fromkeys(findings)]}


def _metadata() -> Iterator[Finding]:
    """Find what is wrong before anything is imported."""
    for problem in (*discover().problems, *misspelt_groups()):
        yield Finding(f"{problem.provider}: {problem.reason}", problem.provider)
    known = {offer.name for offer in shown_offers()}
    for name in host_state().settings().config.plugins_disable or ():
        if not any(offer.answers_to(name) for offer in shown_offers()):
            near = close_matches(name, known)
            yield Finding(f"the deny list names {name!r}, which is not installed: {near}")


def _as_dict(record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "provider": record.provider.to_dict(),
        "status": record.status.value,
        "reason": record.reason,
    }
