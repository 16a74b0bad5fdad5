"""``opgraft plugins show``: one plugin or platform, and how far it came."""

from __future__ import annotations

from typing import Any

import click
from opgraft.cli.completion import offer_names
from opgraft.cli.loading import load_all
from opgraft.cli.offers import as_dict, shown_offers
from opgraft.cli.output import echo, json_option, print_json, print_wrapped, with_settings
from opgraft.errors import InputError, close_matches
from opgraft.plugins.discovery import PLUGIN_GROUP, Offer
from opgraft.state import host_state


@click.command("show")
@click.argument("name", shell_complete=offer_names)
@json_option
@with_settings
def command(name: str, as_json: bool) -> None:
    """Load the plugins and show one of them.

    NAME is that of a plugin, a platform or a distribution. Shown are its status and the reason, its registrations, and
    the traceback if it failed.
    """
    offers = [offer for offer in shown_offers() if offer.answers_to(name)]
    if not offers:
        known = {offer.name for offer in shown_offers()}
        raise InputError(f"no installed plugin or platform is called {name!r}: {close_matches(name, known)}")
    error = load_all()
    shown = [_details(offer) for offer in offers]
    if as_json:
        print_json("opgraft.plugins.show/2", {"offers": shown, "error": str(error) if error else None})
    else:
        for details in shown:
            _print_details(details)
    if error is not None:
        raise error


def _print_details(details: dict[str, Any]) -> None:
    for key, value in details.items():
        if key == "traceback" and value:
            print_wrapped(value)
        else:
            print_wrapped(f"{key.replace('_', ' ')}: {_in_words(value)}")
    echo()


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['name']} {value['version']}"
    if isinstance(value, list):
        return ", ".join(_replacement(item) if isinstance(item, dict) else item for item in value)
    return str(value or "")


def _replacement(row: dict[str, Any]) -> str:
    return f"{row['target']} -> {row['class']} at {row['location']}"


def _details(offer: Offer) -> dict[str, Any]:
    details = {**as_dict(offer), "requires": list(offer.requires)}
    record = host_state().plugins.get(offer.name) if offer.group == PLUGIN_GROUP else None
    if record is None:
        return details
    declared = [r for r in host_state().registry.replacements if r.plugin == record.name]
    return {
        **details,
        "status": record.status.value,
        "reason": record.reason,
        "platforms": list(record.platforms),
        "replacements": [
            {"target": r.asked_for, "class": r.cls.__qualname__, "location": r.location} for r in declared
        ],
        "traceback": record.traceback,
    }
