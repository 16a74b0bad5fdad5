"""``opgraft plugins doctor``: load everything, and report faults."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
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
from opgraft.plugins.discovery import normalized
from opgraft.plugins.locking import installed, lockfile
from opgraft.plugins.making_locks import lock_installed
from opgraft.plugins.metadata import Problem
from opgraft.plugins.outcomes import end_of, findings_of
from opgraft.plugins.remarks import PLATFORM_FINDINGS, PLATFORM_NOTES
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import PluginRecord, PluginStatus, host_state

_FAILED = 4
"""The exit code of a failed plugin. The machine may be the cause, so such a result is not kept."""


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

    Exit codes: 1 findings, 2 an unusable setting, 3 no platform, 4 a plugin failed. Everything is
    loaded in a child process. So a plugin that ends or crashes its process is reported, too. The
    last result is printed again if no plugin failed, and plugins, drivers, devices and settings are
    the same.
    """
    if no_cache:
        quarantine.forget_all()
    key = kept_results.key()
    kept = kept_results.look_up(key) if key and not no_cache else None
    limits = Limits(time_limit)
    if memory_limit is not None:
        limits = Limits(time_limit, int(memory_limit * 2**30))
    report = {**kept.report} if kept else _report(limits)
    if key and not kept and _exit_code(report) < _FAILED:
        kept_results.keep(key, report)
    # Not kept: the notes need no load, and the time is that of the kept result.
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
    """Load everything in a child process. Return plugins, findings and notes as plain data."""
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
        # The last child went without this plugin, because an earlier child had failed by it.
        if said:
            row["status"] = PluginStatus.FAILED.value
            row["reason"] = said
    # A plugin with code that fails at exit works. Its row stays the same.
    ended = [outcome.at_exit] if outcome.at_exit else []
    findings = [finding.to_dict() for finding in (*lost, *ended)]
    return report | {"findings": findings + report["findings"]}


def _exit_code(report: Mapping[str, Any]) -> int:
    return max((finding["exit_code"] for finding in report["findings"]), default=0)


def _print(report: Mapping[str, Any]) -> None:
    plugins = report["plugins"]
    for row in plugins:
        line = f"{row['name']} ({_in_words(row['provider'])}): {row['status']}"
        # A finding with the same words follows below.
        if row["reason"] and not _told(row, report["findings"]):
            line += f": {row['reason']}"
        print_wrapped(line)
    for finding in report["findings"]:
        print_wrapped(f"finding: {Finding.from_dict(finding)}")
    for note in report["notes"]:
        print_wrapped(f"seen: {_in_words(note['provider'])}: {note['reason']}")
    if not report["findings"]:
        active = sum(row["status"] == PluginStatus.ACTIVATED.value for row in plugins)
        summary = f"{active} of {len(plugins)} plugins active, nothing wrong"
        if active < len(plugins):
            summary += "; why a platform is not there: opgraft detect --all"
        echo(summary)
    if report["cached"]:
        echo(
            f"as of {report['cached']}, since when nothing has changed: --no-cache loads "
            "everything again"
        )


def _told(row: Mapping[str, Any], findings: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if one of the findings has the reason of a plugin's status."""
    reason = row["reason"]
    provider = Provider(**row["provider"])
    status = PluginStatus(row["status"])
    record = PluginRecord(row["name"], "", provider, status, reason)
    messages = {reason}
    end = end_of(record)
    if end is not None:
        messages.add(end.message)
    return any(finding["message"] in messages for finding in findings)


def _in_words(provider: Mapping[str, Any]) -> str:
    return str(Provider(**provider))


def examine() -> dict[str, Any]:
    """Load everything in this process. Return plugins, findings and notes as plain data."""
    error = load_all()
    records = host_state().plugins.values()
    findings = found(records, loaded=error is None)
    if error is not None:
        # In strict mode, the error may be about one plugin. Then there is a finding already.
        told = str(error).removeprefix("strict mode: ")
        if told not in {finding.message for finding in findings}:
            findings.append(Finding(str(error), exit_code=error.exit_code))
    notes = list(starmap(Problem, PLATFORM_NOTES.get()))
    for record in records:
        for note in record.notes:
            notes.append(Problem(record.provider, f"plugin {record.name} {note}"))
    return {
        "plugins": [_plugin_as_dict(record) for record in records],
        "findings": [finding.to_dict() for finding in findings],
        "notes": as_dicts(notes),
    }


def found(records: Iterable[PluginRecord], *, loaded: bool) -> list[Finding]:
    """Return all findings after loading: about metadata, platforms and plugins, and of checks.

    Args:
        records: of the plugins.
        loaded: True if everything was loaded. Otherwise there are no checks.
    """
    all_findings = [*metadata_findings(), *PLATFORM_FINDINGS.get()]
    for record in records:
        all_findings.extend(findings_of(record))
    if loaded:
        all_findings.extend(_findings_of_lockfile())
        diagnosis = importlib.import_module("opgraft.testing.diagnosis")
        all_findings.extend(diagnosis.diagnose())
    return list(dict.fromkeys(all_findings))


def _findings_of_lockfile() -> Iterator[Finding]:
    """Yield locked plugins that are not installed, and unlisted ones that cannot be locked."""
    settings = host_state().settings()
    path = settings.config.lockfile
    if path is None:
        return
    rows = lockfile(path, settings.origins["lockfile"]).rows
    for name, row in rows.items():
        # The plugin that needs a missing dependency says so.
        if row.entry_points and installed(name) is None:
            about = f"{row.name} {row.version} is in {settings.named('lockfile')}"
            yield Finding(
                f"{about} {path} and not installed: install this version, or lock without it by "
                f"'opgraft plugins lock --output {path}'",
                Provider(row.name, row.version),
            )
    _, left_out = lock_installed(settings, allow_editable=False)
    for problem in left_out:
        # A locked distribution that has changed has a finding of its own.
        if normalized(problem.provider.name) not in rows:
            message = f"'opgraft plugins lock' leaves {problem.provider} out: {problem.reason}"
            yield Finding(message, problem.provider)


def _plugin_as_dict(record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "provider": record.provider.to_dict(),
        "status": record.status.value,
        "reason": record.reason,
        "seconds": round(record.seconds, 3),
    }
