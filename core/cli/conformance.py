"""``opgraft conformance``: ask every check of the kit of a plugin, and write the evidence."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import click
from opgraft.base.text import printable
from opgraft.base.version import __version__
from opgraft.cli import evidence
from opgraft.cli.evidence import ConformanceEvidence
from opgraft.cli.isolation import Limits, isolated, tell
from opgraft.cli.output import GivenPath, SettingsCommand, print_wrapped, with_settings
from opgraft.cli.report_page import page
from opgraft.errors import InputError, PluginError
from opgraft.plugins.discovery import HOST_DISTRIBUTION, names_of, normalized

TIME_LIMIT = 24 * 3600.0
"""Seconds. Kernels of a simulated device may take long."""

_FILE = GivenPath(path_type=Path, dir_okay=False)


@click.command("conformance", cls=SettingsCommand)
@click.argument("plugin")
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write the evidence to FILE.")
@click.option(
    "--html", "page_file", metavar="FILE", type=_FILE, help="Write a report for browsers to FILE."
)
@click.option("--docs", metavar="URL", help="The report links to the documentation there.")
@click.option(
    "--baseline",
    metavar="FILE",
    type=_FILE,
    help="Fail only on what passed in this earlier evidence.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the evidence in the FILE of --json, or with what is kept.",
)
@with_settings
def command(
    plugin: str,
    json_file: Path | None,
    page_file: Path | None,
    docs: str | None,
    baseline: Path | None,
    resume: bool,
) -> None:
    """Run every check of the kit on PLUGIN.

    PLUGIN is the name of an entry point, a distribution or a built-in platform. The answers are
    kept, and 'opgraft plugins show' sums them up. After an interrupted run, --resume goes on from
    there.

    Exit codes: 1, a check failed; with --baseline, a check failed that passed in the baseline. 2,
    the command was not understood. 4, the plugin ended its process at import.
    """
    before = evidence.read(baseline) if baseline else None
    if docs is not None and not docs.startswith(("http://", "https://", "file://")):
        raise InputError(
            f"--docs is {docs!r}: name an address that begins with https://, http:// or file://"
        )
    earlier = json_file or evidence.kept_file(subject_of(plugin))
    found = ConformanceEvidence()
    if resume and earlier and earlier.exists():
        found = evidence.read(earlier)
    run = Run(plugin, found, json_file, brief=False)
    run.judge()
    regressions = found.regressions(before) if before else None
    run.write(regressions)
    if page_file is not None:
        evidence.write_text(page_file, page(found.to_dict(regressions), docs))
    report(found, regressions)
    counted = found.failed() if regressions is None else regressions
    sys.exit(1 if counted else 0)


def report(found: ConformanceEvidence, regressions: list[dict[str, Any]] | None) -> None:
    """Print each failure once, and the number of answers by status."""
    new = {evidence.key_of(outcome) for outcome in regressions or ()}
    for outcome in found.failed():
        if evidence.key_of(outcome) not in new:
            print_wrapped(f"failed: {_name(outcome)}: {outcome['reason']}")
    for outcome in regressions or ():
        now = f"now {outcome['status']}: {outcome['reason']}"
        print_wrapped(f"regression: {_name(outcome)} passed before, {now}")
    about = found.about
    counts = found.counted()
    plugin = f"{about['plugin']} {about['provider']['version']}"
    where = f"{plugin} on {about['platform']} ({about['device']})"
    told = [f"{count} {status}" for status, count in counts.items()]
    print_wrapped(f"{where}: {', '.join(told)}")


def _name(outcome: dict[str, Any]) -> str:
    return " ".join(filter(None, (outcome["op"], outcome["check"], outcome["dtype"])))


def subject_of(plugin: str) -> str:
    """Return the name of kept evidence: the distribution, or the built-in platform.

    Raises:
        ConfigError: no installed plugin has the name.
    """
    provider, _, platforms = names_of(plugin)
    return platforms[0] if provider == HOST_DISTRIBUTION else normalized(provider)


class Run:
    """Judges a plugin in child processes. If a check ends a process, another process goes on.

    Args:
        plugin: the name.
        found: takes the answers; answered questions are not asked again.
        file: written after each op, if given.
        brief: ask the short form; the answers of the short form are not kept.
    """

    def __init__(
        self, plugin: str, found: ConformanceEvidence, file: Path | None, *, brief: bool
    ) -> None:
        self.plugin = plugin
        self.found = found
        self.file = file
        self.brief = brief
        self.asked: dict[str, Any] = {}
        self.op = ""
        self._subject = subject_of(plugin)

    def judge(self) -> None:
        """Ask every question.

        Raises:
            PluginError: loading the plugin ends the process.
            Abort: after an interrupt, and after the answers so far are written.
        """
        while True:
            self.asked = {}
            try:
                done = json.dumps([list(key) for key in self.found.outcomes])
                given = (self.plugin, str(self.brief), done)
                limits = Limits(TIME_LIMIT)
                ended = isolated(__name__, "examine", *given, limits=limits, heard=self.hear)
            except KeyboardInterrupt:
                told = f"{len(self.found.outcomes)} of {self.found.cases} questions answered"
                same = " with the same --json" if self.file is not None else ""
                goes_on = f"; --resume{same} goes on" if self.write() else ""
                click.echo(f"interrupted: {told}{goes_on}", err=True)
                raise click.Abort from None
            if ended.crash is None:
                return
            # The child has ended before the first question.
            if not self.asked:
                raise PluginError(str(ended.crash))
            # A check that ends the process has failed. The next child goes on behind the check.
            reason = printable(str(ended.crash))
            self.hear({"outcome": {**self.asked, **_CRASHED, "reason": reason}})

    def hear(self, told: dict[str, Any]) -> None:
        """Take note of a message of the child."""
        if "about" in told:
            if self.found.about:
                file = self.file or evidence.kept_file(self._subject)
                self.found.expect_same(told["about"], file)
            self.found.about = told["about"]
            self.found.cases = told["cases"]
        elif "asked" in told:
            self.asked = told["asked"]
            self._progress()
        else:
            self.asked = {}
            self.found.add(told["outcome"])

    def _progress(self) -> None:
        """Print the next op when the op changes, and write the answers so far."""
        op = self.asked["op"]
        if op != self.op:
            self.op = op
            click.echo(f"[{len(self.found.outcomes)}/{self.found.cases}] {printable(op)}", err=True)
            self.write()

    def write(self, regressions: list[dict[str, Any]] | None = None) -> bool:
        """Write the answers so far; return True if a later run can go on with a file."""
        if self.brief or not self.found.about:
            return False
        data = self.found.to_dict(regressions)
        kept = evidence.keep(self._subject, data)
        if self.file is not None:
            evidence.write(self.file, data)
        return self.file is not None or kept is not None


_CRASHED = {"status": "failed", "error": None, "speed": None, "seconds": 0.0}


def examine(plugin: str, brief: str, done: str) -> None:
    """Answer the open questions in this process, and tell each answer to the parent."""
    conformance = importlib.import_module("opgraft.testing.conformance")
    watching = importlib.import_module("opgraft.registry.watching")
    known = {tuple(key) for key in json.loads(done)}
    with conformance.alone(plugin):
        judged = conformance.Conformance(plugin, brief=brief == str(True), timed=brief != str(True))
        tell({"about": _about(judged), "cases": len(judged.cases)})
        for case in judged.cases:
            asked = {"op": case.op, "check": case.check, "dtype": case.dtype}
            if tuple(asked.values()) not in known:
                tell({"asked": asked})
                # Without a provider: a plugin on trial is not put into quarantine.
                with watching.watching_code(f"{case} of {judged.provider}", None):
                    outcome = judged.judge(case)
                tell({"outcome": outcome.to_dict()})


def _about(judged: Any) -> dict[str, Any]:
    """Return the subject of the answers: plugin, platform, device, versions, day and questions."""
    torch = importlib.import_module("torch")
    selected = importlib.import_module("opgraft.plugins.selection").current_platform()
    versions = {
        "opgraft": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {
        "plugin": judged.plugin,
        "provider": judged.provider.to_dict(),
        "platform": selected.name,
        "device": selected.capability().name,
        "versions": versions,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "code": evidence.digest_of_code(judged.provider),
        "brief": judged.brief,
        "ops": judged.ops,
        "checks": judged.checks,
    }
