"""``opgraft plugins doctor``: load everything, and report what is wrong."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import importlib_metadata
from opgraft.cli.loading import load_all
from opgraft.cli.offers import shown_offers
from opgraft.cli.output import COMMAND_LINE, echo, json_option, print_json, print_wrapped, with_settings
from opgraft.config import config_from_fields, parse_text, set_config
from opgraft.decision import Provider
from opgraft.errors import ChildError, close_matches
from opgraft.finding import Finding
from opgraft.machine.child import ask_child
from opgraft.plugins.discovery import HARDWARE_GROUP, PLATFORM_GROUP, PLUGIN_GROUP, discover
from opgraft.plugins.requirements import objection
from opgraft.state import PluginRecord, PluginStatus, host_state

_CHILD = "from opgraft.cli.plugins_doctor import answer; answer(reply_to, *sys.argv[3:])"
_TIME_LIMIT = 600.0  # seconds: a plugin may compile its kernels when it is first imported


@click.command("doctor")
@json_option
@with_settings
def command(as_json: bool) -> None:
    """Load everything and report what is wrong.

    Exit codes: 1 findings, 2 a setting that cannot be used, 3 no platform, 4 a plugin failed. Everything is loaded in
    a child process, so that a plugin that ends or crashes its process is reported, too.
    """
    given = {name: text for name, text, origin in host_state().settings().rows() if origin == COMMAND_LINE}
    report = _examined(given)
    if as_json:
        print_json("opgraft.plugins.doctor/2", report)
    else:
        _print(report)
    sys.exit(max((finding["exit_code"] for finding in report["findings"]), default=0))


def _print(report: Mapping[str, Any]) -> None:
    for row in report["plugins"]:
        reason = f": {row['reason']}" if row["reason"] else ""
        print_wrapped(f"{row['name']} ({_in_words(row['provider'])}): {row['status']}{reason}")
    for finding in report["findings"]:
        place = f" ({finding['location']})" if finding["location"] else ""
        print_wrapped(f"finding: {finding['message']}{place}")
    if not report["findings"]:
        active = sum(row["status"] == PluginStatus.ACTIVATED.value for row in report["plugins"])
        echo(f"{active} of {len(report['plugins'])} plugins active, nothing wrong")


def _in_words(provider: Mapping[str, Any]) -> str:
    return str(Provider(**provider))


def _examined(given: Mapping[str, str]) -> dict[str, Any]:
    """What a child process finds under these settings; where it ends without an answer, whose plugin ended it."""
    try:
        return _ask(given)
    except ChildError as error:
        findings = [Finding(f"loading the plugins ended the process: {error}", exit_code=4), *_culprits(given)]
        return {"plugins": [], "findings": [finding.to_dict() for finding in findings]}


def _ask(given: Mapping[str, str]) -> dict[str, Any]:
    report: dict[str, Any] = ask_child(_CHILD, (json.dumps(dict(given)),), time_limit=_TIME_LIMIT)
    return report


def _culprits(given: Mapping[str, str]) -> Iterator[Finding]:
    """The distributions of which each, alone, ends the process that loads it."""
    config = host_state().settings().config
    providers = dict.fromkeys(o.provider for o in shown_offers() if not o.built_in and not objection(o, config))
    for provider in providers:
        try:
            _ask({**given, "plugins": provider.name})
        except ChildError as error:
            advice = f"Go without it by OPGRAFT_PLUGINS_DISABLE={provider.name}"
            yield Finding(f"{provider} ends the process that loads it: {error}. {advice}", provider, exit_code=4)


def answer(reply_to: str, given: str) -> None:
    """The child's side: examine everything and write what was found to the file ``reply_to``."""
    values = {name: parse_text(name, text) for name, text in json.loads(given).items()}
    with set_config(config_from_fields(values), origin=COMMAND_LINE):
        report = examine()
    Path(reply_to).write_text(json.dumps(report), encoding="utf-8")


def examine() -> dict[str, Any]:
    """Load everything in this process; returns the plugins and the findings as plain data."""
    error = load_all()
    findings = [*_metadata(), *map(Finding, host_state().platform_failures), *_outcomes()]
    if error is not None:
        findings.append(Finding(str(error), exit_code=error.exit_code))
    else:
        findings += importlib.import_module("opgraft.testing.diagnosis").diagnose()
    plugins = [_as_dict(record) for record in host_state().plugins.values()]
    return {"plugins": plugins, "findings": [finding.to_dict() for finding in dict.fromkeys(findings)]}


def _metadata() -> Iterator[Finding]:
    """What is wrong before anything is imported."""
    for problem in discover().problems:
        yield Finding(f"{problem.provider}: {problem.reason}", problem.provider)
    yield from _misspelt_groups()
    known = {offer.name for offer in shown_offers()}
    for name in host_state().settings().config.plugins_disable or ():
        if not any(offer.answers_to(name) for offer in shown_offers()):
            near = close_matches(name, known)
            yield Finding(f"the deny list names {name!r}, which is not installed: {near}")


def _misspelt_groups() -> Iterator[Finding]:
    """Groups of entry points that nothing reads and whose name is nearly that of one that opgraft reads."""
    for distribution in importlib_metadata.Distribution.discover():
        text = distribution.read_text("entry_points.txt") or ""
        for group in re.findall(r"^\s*\[([^\]\n]+)\]\s*$", text, re.M):
            near = close_matches(group, (PLATFORM_GROUP, PLUGIN_GROUP))
            if group not in (PLATFORM_GROUP, PLUGIN_GROUP, HARDWARE_GROUP) and near.startswith("did you mean"):
                provider = Provider(str(distribution.metadata["Name"]), distribution.version)
                yield Finding(f"{provider}: nothing reads its entry-point group {group!r}: {near}", provider)


def _outcomes() -> Iterator[Finding]:
    """Plugins that should have become active and did not."""
    for record in host_state().plugins.values():
        whose = f"plugin {record.name} of {record.provider}"
        if record.status is PluginStatus.REJECTED and record.reason.startswith("it requires"):
            yield Finding(f"{whose} is not used: {record.reason}", record.provider)
        if record.status is PluginStatus.VETOED:
            yield Finding(f"{whose} is not used, as it vetoed itself: {record.reason}", record.provider)
        if record.status is PluginStatus.FAILED:
            yield Finding(f"{whose} failed {record.reason}", record.provider, exit_code=4)


def _as_dict(record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "provider": record.provider.to_dict(),
        "status": record.status.value,
        "reason": record.reason,
    }
