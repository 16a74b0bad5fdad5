"""``opgraft conformance``: ask every check of the kit of a plugin, and write the evidence."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from opgraft.base.installed import version_of
from opgraft.base.text import printable
from opgraft.base.version import __version__
from opgraft.cli import evidence
from opgraft.cli.evidence import DEVICE, ConformanceEvidence
from opgraft.cli.isolation import Limits, isolated, tell
from opgraft.cli.output import GivenPath, SettingsCommand, print_wrapped, with_settings
from opgraft.cli.report_page import page
from opgraft.cli.shapes_option import recorded, shapes_option
from opgraft.errors import InputError, PluginError
from opgraft.plugins.discovery import HOST_DISTRIBUTION, names_of, normalized

TIME_LIMIT = 24 * 3600.0
"""Seconds. Kernels of a simulated device may take long."""

SUITE_TIME_LIMIT = 900.0
"""Seconds of a test of the device suite, or of the collection of a part."""

SUITE = "torchcts"
"""The package of the device suite, and its distribution."""

LEVEL = 3
"""The deepest tests of the device suite. TorchCTS has the same default."""

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
@click.option(
    "--device-suite", is_flag=True, help="Run TorchCTS on the plugin's torch device instead."
)
@click.option(
    "--suite-level",
    metavar="LEVEL",
    type=click.IntRange(1, 8),
    default=LEVEL,
    help=f"The deepest tests of TorchCTS, from 1 to 8; {LEVEL} by default.",
)
@click.option(
    "--suite-part",
    "suite_parts",
    metavar="PART",
    multiple=True,
    help="A folder, file or test of TorchCTS, such as rng; may be repeated.",
)
@shapes_option
@with_settings
def command(
    plugin: str,
    json_file: Path | None,
    page_file: Path | None,
    docs: str | None,
    baseline: Path | None,
    resume: bool,
    device_suite: bool,
    suite_level: int,
    suite_parts: tuple[str, ...],
    shapes: str | None,
) -> None:
    """Run every check of the kit on PLUGIN.

    PLUGIN is the name of an entry point, a distribution or a built-in platform. The answers are
    kept, and 'opgraft plugins show' sums them up. After an interrupted run, --resume goes on from
    there.

    With --device-suite, the tests of TorchCTS run on the torch device of the plugin's platform, as
    far as the platform claims what they test.

    Exit codes: 1, a check failed; with --baseline, a check failed that passed in the baseline. 2,
    the command was not understood. 4, the plugin ended its process at import.
    """
    # Files are read first: a wrong name must not cost the hours of a run.
    recorded(shapes)
    before = evidence.read(baseline) if baseline else None
    if docs is not None and not docs.startswith(("http://", "https://", "file://")):
        raise InputError(
            f"--docs is {docs!r}: name an address that begins with https://, http:// or file://"
        )
    if suite_parts and not device_suite:
        raise InputError("--suite-part names parts of TorchCTS, which --device-suite runs")
    if shapes is not None and device_suite:
        raise InputError(
            "--shapes replays calls of ops, and --device-suite asks of none: leave one out"
        )
    parts = _parts_of_suite(suite_parts) if device_suite else ()
    earlier = json_file or evidence.kept_file(subject_of(plugin))
    found = ConformanceEvidence()
    if resume and earlier and earlier.exists():
        found = evidence.read(earlier)
    run = Run(plugin, found, json_file, shapes, brief=False)
    if device_suite:
        run = SuiteRun(plugin, found, json_file, level=suite_level, parts=parts)
    run.judge()
    regressions = found.regressions(before) if before else None
    run.write(regressions)
    if page_file is not None:
        evidence.write_text(page_file, page(found.to_dict(regressions), docs))
    report(found, regressions)
    counted = found.failed() if regressions is None else regressions
    sys.exit(1 if counted else 0)


def _parts_of_suite(named: Sequence[str]) -> Sequence[str]:
    """Return the parts of the device suite to run: the named ones, or all.

    Raises:
        InputError: the suite is not installed, or has no such part.
    """
    installed = find_spec(SUITE)
    if installed is None or installed.origin is None:
        raise InputError(
            "--device-suite runs TorchCTS, which is not installed: pip install "
            "'opgraft[device-suite]'. Beside a torch that TorchCTS does not list: pip install "
            "--no-deps torchcts expecttest mpmath psutil pytest"
        )
    root = Path(installed.origin).parent
    for part in named:
        file, _, _ = part.partition("::")
        if not (root / file).exists():
            raise InputError(
                f"TorchCTS has no part {part!r:.200}: name a folder, a file or a test below "
                f"{root}, such as rng"
            )
    # Each part is collected by itself, and anew if one of its tests has ended the process.
    suites: Sequence[str] = importlib.import_module(f"{SUITE}.cli").DEFAULT_TEST_SUITES
    return named or suites


def report(found: ConformanceEvidence, regressions: list[dict[str, Any]] | None) -> None:
    """Print each failure once, and the number of answers by status."""
    new = {evidence.key_of(outcome) for outcome in regressions or ()}
    for outcome in found.failed():
        if evidence.key_of(outcome) not in new:
            print_wrapped(f"failed: {_name(outcome)}: {outcome['reason']}")
    for outcome in regressions or ():
        now = f"now {outcome['status']}: {outcome['reason']}"
        print_wrapped(f"regression: {_name(outcome)} passed before, {now}")
    _report_lines(found)
    _report_left_out(found)
    _report_skipped(found)
    about = found.about
    counts = found.counted()
    plugin = f"{about['plugin']} {about['provider']['version']}"
    where = f"{plugin} on {about['platform']} ({about['device']})"
    told = [f"{count} {status}" for status, count in counts.items()]
    print_wrapped(f"{where}: {', '.join(told)}")
    if regressions is not None:
        both = sum(evidence.key_of(outcome) not in new for outcome in found.failed())
        print_wrapped(
            f"against the baseline: checks that passed before and do not now: {len(regressions)}; "
            f"failed checks that did not pass before either: {both}"
        )
    if found.device_suite:
        print_wrapped(_score(found))


def _report_lines(found: ConformanceEvidence) -> None:
    """Print for each op the lines of the kernel that no call ran, and ops without such lines."""
    unknown: dict[str, list[str]] = {}
    for op, lines in found.lines().items():
        if lines.never_run:
            print_wrapped(f"never run: {op}: {', '.join(lines.never_run)}")
        if lines.unknown:
            unknown.setdefault(lines.unknown, []).append(op)
    for reason, ops in unknown.items():
        print_wrapped(f"not known which branches ran, as {reason}: {', '.join(ops)}")


def _report_left_out(found: ConformanceEvidence) -> None:
    """Print the number of answers that left out inputs, and one of the reasons."""
    answers = (each for each in found.outcomes.values() if not evidence.is_of_device(each))
    passed = [each for each in answers if each["status"] == "passed"]
    reasons = [f"{_name(each)}: {each['reason']}" for each in passed if each["reason"]]
    if reasons:
        print_wrapped(f"inputs left out in {len(reasons)} answers, such as {reasons[0]}")


def _report_skipped(found: ConformanceEvidence) -> None:
    """Print each reason to skip, with the number of answers and the checks."""
    by_reason: dict[str, list[str]] = {}
    for outcome in found.outcomes.values():
        # The device suite counts its own.
        if outcome["status"] == "skipped" and not evidence.is_of_device(outcome):
            by_reason.setdefault(outcome["reason"], []).append(outcome["check"])
    for reason, checks in by_reason.items():
        names = ", ".join(dict.fromkeys(checks))
        print_wrapped(f"skipped: {len(checks)} of {names}: {reason}")


def _score(found: ConformanceEvidence) -> str:
    """Return a line about the device suite: score, tests, level, and tests left out by reason."""
    suite = found.device_suite
    score = found.score()
    ran = sum(outcome["status"] != "skipped" for outcome in found.of_device())
    passed = "no test ran" if score is None else f"{score:.1%} of {ran} tests passed"
    left_out: Counter[str] = Counter()
    for reasons in suite["left_out"].values():
        left_out.update(reasons)
    told = [f"{count} {reason}" for reason, count in left_out.most_common()]
    about = f"{suite['name']} {suite['version']}, level {suite['level']}"
    return f"device suite: {passed} ({about}); left out: {', '.join(told) or 'none'}"


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

    Attributes:
        keeps: the answers are kept for this user on this machine.
        seconds: the time limit of an answer.

    Args:
        plugin: the name.
        found: takes the answers; answered questions are not asked again.
        file: written after each op, if given.
        shapes: the name or the file of a record of shapes to replay, or ``None``.
        brief: ask the short form; the answers of the short form are not kept.
    """

    keeps = True
    seconds = TIME_LIMIT

    def __init__(
        self,
        plugin: str,
        found: ConformanceEvidence,
        file: Path | None,
        shapes: str | None = None,
        *,
        brief: bool,
    ) -> None:
        self.plugin = plugin
        self.found = found
        self.file = file
        self.shapes = shapes
        self.brief = brief
        self.asked: dict[str, Any] = {}
        self.shown = ""
        # The plugin on trial is the only one, so the usual advice to go without one is useless.
        self.advice = "Ctrl-C ends the run"
        self.advice += "." if brief else ", which keeps the answers so far; --resume goes on."
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
                limits = Limits(self.seconds)
                ended = isolated(
                    __name__, *self.asking(), limits=limits, heard=self.hear, advice=self.advice
                )
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

    def asking(self) -> tuple[str, ...]:
        """Return the function that asks the open questions in the child, and its arguments."""
        done = json.dumps([list(key) for key in self.found.outcomes])
        return "examine", self.plugin, str(self.brief), done, self.shapes or ""

    def hear(self, told: dict[str, Any]) -> None:
        """Take note of a message of the child."""
        if "about" in told:
            # Of an earlier run, or of a child that a check has ended.
            if self.found.about:
                file = self.file or evidence.kept_file(self._subject)
                self.found.expect_same(told["about"], file)
            self.found.about = told["about"]
        if "cases" in told:
            # Evidence may have answers of the device suite beside those of the kit.
            others = [each for each in self.found.outcomes.values() if not self.asks(each)]
            self.found.cases = told["cases"] + len(others)
        if "asked" in told:
            self.asked = told["asked"]
            self._progress()
        if "outcome" in told:
            self.asked = {}
            self.found.add(told["outcome"])

    def asks(self, outcome: Mapping[str, Any]) -> bool:
        """Return True if an answer is to a question of this kind of run."""
        return not evidence.is_of_device(outcome)

    def topic(self) -> str:
        """Return the topic of the running question. Progress has a line for each topic."""
        return str(self.asked["op"])

    def _progress(self) -> None:
        """Print the next topic when the topic changes, and write the answers so far."""
        topic = self.topic()
        if topic != self.shown:
            self.shown = topic
            told = f"[{len(self.found.outcomes)}/{self.found.cases}] {printable(topic)}"
            click.echo(told, err=True)
            self.write()

    def write(self, regressions: list[dict[str, Any]] | None = None) -> bool:
        """Write the answers so far; return True if a later run can go on with a file."""
        if self.brief or not self.found.about:
            return False
        data = self.found.to_dict(regressions)
        kept = evidence.keep(self._subject, data) if self.keeps else None
        if self.file is not None:
            evidence.write(self.file, data)
        return self.file is not None or kept is not None


class SuiteRun(Run):
    """Runs the device suite, each part as ``Run`` asks questions.

    Nothing is kept: the kept evidence is that of the kit.

    Args:
        plugin: as of ``Run``.
        found: as of ``Run``.
        file: as of ``Run``.
        level: the deepest tests of the suite, from 1 to 8.
        parts: folders, files or tests of the suite.
    """

    keeps = False
    seconds = SUITE_TIME_LIMIT

    def __init__(
        self,
        plugin: str,
        found: ConformanceEvidence,
        file: Path | None,
        *,
        level: int,
        parts: Sequence[str],
    ) -> None:
        super().__init__(plugin, found, file, brief=False)
        self.parts = parts
        self.part = ""
        self.level = level
        suite = {"name": SUITE, "version": version_of(SUITE), "level": level}
        found.device_suite = {"left_out": {}, **found.device_suite, **suite}

    def judge(self) -> None:
        for part in self.parts:
            self.part = part
            super().judge()

    def asking(self) -> tuple[str, ...]:
        done = json.dumps([each["check"] for each in self.found.of_device()])
        return "examine_device", self.plugin, self.part, str(self.level), done

    def hear(self, told: dict[str, Any]) -> None:
        suite = self.found.device_suite
        suite |= told.get("claims", {})
        if "left_out" in told:
            suite["left_out"] = {**suite["left_out"], self.part: told["left_out"]}
        super().hear(told)

    def asks(self, outcome: Mapping[str, Any]) -> bool:
        return evidence.is_of_device(outcome) and outcome["check"].startswith(self.part)

    def topic(self) -> str:
        file, _, _ = self.asked["check"].partition("::")
        return str(file)


_CRASHED = {"status": "failed", "error": None, "speed": None, "seconds": 0.0, "lines": None}


def examine(plugin: str, brief: str, done: str, shapes: str) -> None:
    """Answer the open questions in this process, and tell each answer to the parent."""
    conformance = importlib.import_module("opgraft.testing.conformance")
    watching = importlib.import_module("opgraft.registry.watching")
    known = {tuple(key) for key in json.loads(done)}
    with conformance.alone(plugin):
        is_brief = brief == str(True)
        given = {"brief": is_brief, "timed": not is_brief, "record": recorded(shapes or None)}
        judged = conformance.Conformance(plugin, **given)
        tell({"about": _about(judged), "cases": len(judged.cases)})
        for case in judged.cases:
            asked = {"op": case.op, "check": case.check, "dtype": case.dtype}
            if tuple(asked.values()) not in known:
                tell({"asked": asked})
                # Without a provider: a plugin on trial is not put into quarantine.
                with watching.watching_code(f"{case} of {judged.provider}", None):
                    outcome = judged.judge(case)
                tell({"outcome": outcome.to_dict()})


def examine_device(plugin: str, part: str, level: str, done: str) -> None:
    """Run the open tests of a part of the device suite, and tell each answer to the parent."""
    conformance = importlib.import_module("opgraft.testing.conformance")
    device_suite = importlib.import_module("opgraft.testing.device_suite")
    selection = importlib.import_module("opgraft.plugins.selection")
    watching = importlib.import_module("opgraft.registry.watching")

    def tell_of_device(told: Mapping[str, Any]) -> None:
        named = {key: {"op": DEVICE, **told[key]} for key in ("asked", "outcome") if key in told}
        tell({**told, **named})

    with conformance.alone(plugin):
        judged = conformance.Conformance(plugin, timed=True)
        tell({"about": _about(judged)})
        # The first case loads the plugin, and the suite needs its platform.
        loading, *_ = judged.cases
        tell({"outcome": judged.judge(loading).to_dict()})
        if not judged.refused:
            platform = selection.current_platform()
            given = part, int(level), set(json.loads(done))
            with watching.watching_code(f"a test of {SUITE}", None):
                device_suite.ask_suite(platform, *given, tell_of_device)


def _about(judged: Any) -> dict[str, Any]:
    """Return the subject of the answers: plugin, platform, device, versions, day and questions."""
    torch = importlib.import_module("torch")
    selected = importlib.import_module("opgraft.plugins.selection").current_platform()
    versions = {
        "opgraft": __version__,
        # Not torch.__version__, which names CUDA too: evidence is compared with what is installed.
        "torch": version_of("torch") or torch.__version__,
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
        "shapes": judged.record.name if judged.record else None,
        "ops": judged.ops,
        "checks": judged.checks,
    }
