"""``opgraft plugins release``: have a plugin that is in quarantine tried again. Imports no torch and no plugin."""

from __future__ import annotations

import click
from opgraft.cli.completion import offer_names
from opgraft.cli.offers import shown_offers
from opgraft.cli.output import json_option, print_json, print_wrapped
from opgraft.errors import InputError
from opgraft.plugins.quarantine import release


@click.command("release")
@click.argument("name", shell_complete=offer_names)
@json_option
def command(name: str, as_json: bool) -> None:
    """Have a plugin that is in quarantine tried again.

    NAME is that of a plugin, a platform or a distribution; once it is uninstalled, only that of the distribution. A
    plugin or probe that ended or held up the process which tried it is in quarantine: it is not used until it changes
    or is released.
    """
    distributions = dict.fromkeys(
        offer.provider.name for offer in shown_offers() if offer.answers_to(name)
    ) or [name]
    released = []
    for distribution in distributions:
        try:
            released += [distribution] if release(distribution) else []
        except OSError as error:
            raise InputError(
                f"the record of {distribution!r} cannot be removed: {error}"
            ) from error
    if not released:
        raise InputError(
            f"{name!r} is not in quarantine: 'opgraft plugins list' shows what is, with the reason"
        )
    if as_json:
        print_json("opgraft.plugins.release/1", {"released": released})
    else:
        print_wrapped(f"released: {', '.join(released)}; to try it: opgraft plugins doctor")
