"""``opgraft plugins doctor``: load everything, and report what is wrong."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from itertools import starmap
from typing import Any

import click
from opgraft.cli import kept_results
from opgraft.cli.isolation import TIME_LIMIT, Limits, examined
from opgraft.cli.loading import load_all
from opgraft.cli.offers import as_dicts, metadata_findings, plugins_of_vllm
from opgraft.cli.output import (
    SettingsCommand,
    echo,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.plugins import quarantine
from opgraft.plugins.metadata import Problem
from opgraft.plugins.outcomes import end_of, findings_of
from opgraft.plugins.remarks import PLATFORM_FINDINGS, PLATFORM_NOTES
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import PluginRecord, PluginStatus, host_state

_FAILED = 4
"""The exit code of a finding that a plugin failed, for which the machine may be the cause."""


@click.command("doctor", cls=SettingsCommand)
@click.option(
    "--no-cache", is_flag=True, help="Forget kept results and quarantine, and load everything."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=TIME_LIMIT,
    show_default=True,
    help="Seconds for the import, each hook and each check of a plugin.",
)
@click.option(
    "--memory-limit",
    type=click.FloatRange(min=0, min_open=True),
    help="GiB for all plugins. [default: half of what there is]",
)
@json_option
@with_settings
def command(no_cache: bool, time_limit: float, memory_limit: float | None, as_json: bool) -> None:
    """Load everything and report what is wrong.

    Exit codes: 1 findings, 2 a setting that cannot be used, 3 no platform, 4 a plugin failed. Everything is loaded in
    a child process, so that a plugin that ends or crashes its process is reported, too. Where no plugin failed, and
    neither plugins nor drivers, devices and settings have changed since, the last result is told again.
    """
    if no_cache:
        quarantine.forget_all()
    key = kept_results.key()
    kept = kept_results.look_up(key) if key and not no_cache else None
    limits = (
        Limits(time_limit)
        if memory_limit is None
        else Limits(time_limit, int(memory_limit * 2**30))
    )
    report = {**kept.report} if kept else _report(limits)
    if key and not kept and _exit_code(report) < _FAILED:
        kept_results.keep(key, report)
    report |= {
        "notes": report["notes"] + as_dicts(plugins_of_vllm()),
        "cached": kept and kept.since,
    }
    if as_json:
        print_json("opgraft.plugins.doctor/2", report)
    else:
        _print(report)
    sys.exit(_exit_code(report))


def _report(limits: Limits) -> dict[str, Any]:
    """Load everything in a child process; returns the plugins, findings and notes as plain data."""
    outcome = examined(__name__, "examine", limits=limits)
    report: dict[str, Any] = {"plugins": [], "findings": [], "notes": []} | (outcome.result or {})
    lost = list(outcome.left_out)
    if outcome.crash is not None:
        lost.append(outcome.crash)
    by_provider = {}
    for finding in lost:
        by_provider[str(finding.provider)] = finding.message
    for row in report["plugins"]:
        provider = _in_words(row["provider"])
        said = by_provider.get(provider)
        if said:  # on the deny list of the child, and failed all the same
            row["status"] = PluginStatus.FAILED.value
            row["reason"] = said
    # The plugin of this one works: its row stays as it is.
    ended = [outcome.at_exit] if outcome.at_exit else []
    findings = [finding.to_dict() for finding in (*lost, *ended)]
    return report | {"findings": findings + report["findings"]}


def _exit_code(report: Mapping[str, Any]) -> int:
    return max((finding["exit_code"] for finding in report["findings"]), default=0)


def _print(report: Mapping[str, Any]) -> None:
    for row in report["plugins"]:
        reason = (
            f": {row['reason']}" if row["reason"] and not _told(row, report["findings"]) else ""
        )
        print_wrapped(f"{row['name']} ({_in_words(row['provider'])}): {row['status']}{reason}")
    for finding in report["findings"]:
        print_wrapped(f"finding: {Finding.from_dict(finding)}")
    for note in report["notes"]:
        print_wrapped(f"seen: {_in_words(note['provider'])}: {note['reason']}")
    if not report["findings"]:
        active = sum(row["status"] == PluginStatus.ACTIVATED.value for row in report["plugins"])
        rest = (
            "; why a platform is not there: opgraft detect --all"
            if active < len(report["plugins"])
            else ""
        )
        echo(f"{active} of {len(report['plugins'])} plugins active, nothing wrong{rest}")
    if report["cached"]:
        echo(
            f"as of {report['cached']}, since when nothing has changed: --no-cache loads everything again"
        )


def _told(row: Mapping[str, Any], findings: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether one of the findings is the end of this very plugin."""
    name, reason = row["name"], row["reason"]
    provider = Provider(**row["provider"])
    status = PluginStatus(row["status"])
    record = PluginRecord(name, "", provider, status, reason)
    messages = {reason}
    end = end_of(record)
    if end is not None:
        messages.add(end.message)
    return any(finding["message"] in messages for finding in findings)


def _in_words(provider: Mapping[str, Any]) -> str:
    return str(Provider(**provider))


def examine() -> dict[str, Any]:
    """Load everything in this process; returns the plugins and the findings as plain data."""
    error = load_all()
    findings = found(host_state().plugins.values(), loaded=error is None)
    # In strict mode it is one plugin's, which has a finding.
    if error is not None and str(error).removeprefix("strict mode: ") not in {
        f.message for f in findings
    }:
        findings.append(Finding(str(error), exit_code=error.exit_code))
    records = host_state().plugins.values()
    notes = [Problem(r.provider, f"plugin {r.name} {note}") for r in records for note in r.notes]
    return {
        "plugins": [_as_dict(record) for record in records],
        "findings": [finding.to_dict() for finding in findings],
        "notes": as_dicts([*starmap(Problem, PLATFORM_NOTES.get()), *notes]),
    }


def found(records: Iterable[PluginRecord], *, loaded: bool) -> list[Finding]:
    """Find what is wrong after loading: metadata, platforms, the outcomes of the plugins ``records``, the checks.

    The checks are left out where not everything could be loaded.
    """
    all_findings = [*metadata_findings(), *PLATFORM_FINDINGS.get()]
    for record in records:
        all_findings.extend(findings_of(record))
    if loaded:
        diagnosis = importlib.import_module("opgraft.testing.diagnosis")
        all_findings.extend(diagnosis.diagnose())
    return list(dict.fromkeys(all_findings))


def _as_dict(record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "provider": record.provider.to_dict(),
        "status": record.status.value,
        "reason": record.reason,
        "seconds": round(record.seconds, 3),
    }
