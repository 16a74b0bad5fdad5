"""``opgraft detect``: the platform of this machine, with reasons. Imports no torch, no plugin."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
from opgraft.base.text import printable
from opgraft.cli.offers import problem_lines, problems
from opgraft.cli.output import (
    GivenPath,
    SettingsCommand,
    echo,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.machine.machine import Machine
from opgraft.plugins.hardware import unclaimed_hardware
from opgraft.plugins.selection import decide_without_torch
from opgraft.registry.decision import NOT_PROBED, Candidate, Decision
from opgraft.registry.state import host_state

_FOLDER = GivenPath(file_okay=False)


@click.command("detect", cls=SettingsCommand)
@click.option("--all", "show_all", is_flag=True, help="Show every candidate with its evidence.")
@click.option(
    "--root", metavar="DIR", type=_FOLDER, help="Look at a recorded machine instead of this one."
)
@click.option(
    "--record",
    metavar="DIR",
    type=_FOLDER,
    help="Write down what the probes read, for a bug report.",
)
@json_option
@with_settings
def command(show_all: bool, root: str | None, record: str | None, as_json: bool) -> None:
    """Show which platform this machine gets, and why.

    Also names what to install for other hardware.
    """
    machine = Machine.recorded(Path(root)) if root else Machine()
    finish = None
    if record:
        # Imported here, because a plain detection should start fast.
        from opgraft.machine.recording import RecordingMachine

        machine = recording = RecordingMachine(machine)
        finish = partial(recording.write, Path(record))
    try:
        decision, unknown = decide_without_torch(host_state().settings(), machine)
        others = unclaimed_hardware(machine, decision)
    finally:
        # Also after an error: a bug report then needs the recording most.
        if finish:
            finish()
    if as_json:
        data = {
            "decision": decision.to_dict(),
            "hardware": [other.to_dict() for other in others],
            "problems": problems(),
            "not_verified": unknown or None,
        }
        print_json("opgraft.detect/2", data)
        return
    if root:
        print_wrapped(f"of the machine that is recorded in {root}, not of this one:")
    print_wrapped(decision.lines() if show_all else _short(decision))
    if unknown:
        print_wrapped(
            f"not verified, as detect imports no torch: {unknown}; 'opgraft plugins doctor' "
            "verifies them"
        )
    for other in others:
        print_wrapped(other.lines())
    for problem in problem_lines():
        print_wrapped(f"ignored: {problem}")
    if record:
        echo(printable(f"recorded to {record}"))


def _short(decision: Decision) -> list[str]:
    """Return lines with the decision, the chosen devices, and unused hardware."""
    lines = [decision.summary()]
    for candidate in decision.candidates:
        if candidate.accepted and candidate.evidence:
            lines += [f"  {line}" for line in candidate.evidence.device_lines()]
        elif _worth_saying(candidate):
            lines.append(f"{candidate.name}: {candidate.reason}")
            if candidate.evidence and candidate.evidence.remedy:
                lines.append(f"  to use it: {candidate.evidence.remedy}")
    return [*lines, f"every candidate: opgraft detect --all; to change it: {decision.setting}"]


def _worth_saying(candidate: Candidate) -> bool:
    """Return True for a rejected candidate with usable hardware, or without any answer."""
    evidence = candidate.evidence
    if evidence is None:
        return not candidate.reason.startswith(NOT_PROBED)
    return bool(evidence.devices) and not evidence.available
