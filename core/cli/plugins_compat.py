"""``opgraft plugins compat``: which names of opgraft a plugin uses. Imports no torch and no plugin."""

from __future__ import annotations

import sys
from collections import Counter

import click
from opgraft.cli.completion import offer_names
from opgraft.cli.offers import shown_offers
from opgraft.cli.output import (
    SettingsCommand,
    json_option,
    print_json,
    print_table,
    print_wrapped,
    with_settings,
)
from opgraft.errors import InputError, close_matches
from opgraft.plugins.compat import CHANGED, GONE, examine
from opgraft.plugins.listing import read_listing
from opgraft.plugins.requirements import CheckedRequirement, checked_requirements
from opgraft.version import __version__


@click.command("compat", cls=SettingsCommand)
@click.argument("plugin", shell_complete=offer_names)
@click.option(
    "--against",
    metavar="VERSION",
    default=__version__,
    show_default=True,
    help="Or FILE.json of a listing.",
)
@json_option
@with_settings
def command(plugin: str, against: str, as_json: bool) -> None:
    """Show which names of opgraft PLUGIN uses, and which of them are deprecated, changed or gone.

    Its source is read and nothing of it imported; what it requires of opgraft and torch is compared, too. Exit code 1:
    a name is changed or gone, a requirement is not met, or a file cannot be read.
    """
    offers = [offer for offer in shown_offers() if not offer.built_in and offer.answers_to(plugin)]
    if not offers:
        known = {offer.name for offer in shown_offers() if not offer.built_in}
        raise InputError(
            f"no installed plugin is called {plugin!r}: {close_matches(plugin, known)}"
        )
    there = read_listing(against)
    found = examine(offers, read_listing(__version__), there)
    required = list(checked_requirements(offers[0], there.version))
    if as_json:
        data = {
            "provider": offers[0].provider.to_dict(),
            "against": there.version,
            "requirements": [each.to_dict() for each in required],
            "names": [row.to_dict() for row in found.names],
            "unread": [{"file": file, "reason": reason} for file, reason in found.unread],
        }
        print_json("opgraft.plugins.compat/1", data)
    else:
        cells = [
            (row.name, row.status, len(row.locations), row.locations[0]) for row in found.names
        ]
        print_table(("name", "status", "uses", "the first"), cells)
        for row in found.names:
            if row.reason:
                print_wrapped(
                    f"{row.status}: {row.name} at {', '.join(row.locations)}: {row.reason}"
                )
        print_wrapped(map(_told, required))
        if not required:
            print_wrapped("it requires no version of opgraft or torch: every one imports it")
        for file, reason in found.unread:
            print_wrapped(f"not read: {file}: {reason}")
        counts = Counter(row.status for row in found.names)
        told = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
        print_wrapped(f"{offers[0].provider} uses names of opgraft {there.version}: {told}")
    wrong = any(row.status in (CHANGED, GONE) for row in found.names)
    sys.exit(1 if wrong or found.unread or any(each.reason for each in required) else 0)


def _told(checked: CheckedRequirement) -> str:
    if checked.reason:
        return f"unmet: {checked.reason}"
    return f"met: {checked.requirement} by {checked.version or 'a version that is not known'}"
