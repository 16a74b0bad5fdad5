"""``opgraft detect``: which platform this machine gets, and why. Imports no torch and no plugin."""

from __future__ import annotations

import click
from opgraft.cli.output import json_option, print_json, print_wrapped, with_settings
from opgraft.machine import Machine
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import decide_platform
from opgraft.state import host_state


@click.command("detect")
@json_option
@with_settings
def command(as_json: bool) -> None:
    """Which platform this machine gets, and why."""
    _, decision = decide_platform(host_state().settings(), Machine())
    problems = [{"provider": str(problem.provider), "reason": problem.reason} for problem in discover().problems]
    if as_json:
        print_json("opgraft.detect/1", {"decision": decision.to_dict(), "problems": problems})
        return
    print_wrapped(str(decision))
    for problem in problems:
        print_wrapped(f"ignored: {problem['provider']}: {problem['reason']}")
