"""``opgraft plugins list``: installed platforms and plugins. Imports no torch and no plugin."""

from __future__ import annotations

import click
from opgraft.cli.offers import (
    KINDS,
    admission,
    as_dict,
    as_dicts,
    misspelt_groups,
    plugins_of_vllm,
    problem_lines,
    problems,
    shown_offers,
)
from opgraft.cli.output import (
    SettingsCommand,
    json_option,
    print_json,
    print_table,
    print_wrapped,
    with_settings,
)
from opgraft.plugins.admission import check_admission
from opgraft.plugins.discovery import Offer
from opgraft.registry.state import host_state


@click.command("list", cls=SettingsCommand)
@json_option
@with_settings
def command(as_json: bool) -> None:
    """List installed platforms and plugins, and whether the settings admit them.

    Imports none of them.
    """
    settings = host_state().settings()
    check_admission(settings)
    rows = [(offer, *admission(offer, settings)) for offer in shown_offers()]
    if as_json:
        offers = []
        for offer, status, reason in rows:
            offers.append({**as_dict(offer), "status": status, "reason": reason})
        found = {"problems": problems(misspelt_groups()), "notes": as_dicts(plugins_of_vllm())}
        print_json("opgraft.plugins.list/2", {"offers": offers, **found})
        return
    cells = []
    for offer, status, reason in rows:
        cells.append((KINDS[offer.group], offer.name, _marked(offer), status, reason))
    print_table(("kind", "name", "provider", "status", "reason"), cells)
    for problem in problem_lines(misspelt_groups()):
        print_wrapped(f"ignored: {problem}")
    for note in plugins_of_vllm():
        print_wrapped(f"seen: {note.provider}: {note.reason}")
    print_wrapped("to load and check them: opgraft plugins doctor")


def _marked(offer: Offer) -> str:
    mark = " (editable)" if as_dict(offer)["editable"] else ""
    return f"{offer.provider}{mark}"
