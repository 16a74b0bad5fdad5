"""The command ``opgraft-vllm-bridge``."""

from __future__ import annotations

import json

import click
from opgraft.errors import InputError, OpgraftError
from opgraft.plugins.bridges import Offer, discover, printable

from opgraft_vllm_bridge.listing import Listing, listing_of

_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


@click.group()
def main() -> None:
    """Questions about plugins of vLLM that run on opgraft."""


@main.command("names")
@click.argument("plugin")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def names(plugin: str, as_json: bool) -> None:
    """List the names of vLLM that PLUGIN uses: which are answered, and which are missing.

    PLUGIN is a distribution, or the name of one of its entry points. Nothing of it is imported.
    """
    try:
        offer, found = _listed(plugin)
    except OpgraftError as error:
        raise click.ClickException(printable(str(error))) from error
    if as_json:
        click.echo(json.dumps(_offer_as_dict(offer, found), indent=2))
        return
    answered = len(found.answered)
    missing = len(found.missing)
    uses = f"{offer.provider} uses {answered + missing} names of vLLM"
    click.echo(f"{uses}: {answered} are answered, {missing} are missing.")
    click.echo("To import, annotate with or derive from a missing name costs nothing.")
    for title, rows in (("answered", found.answered), ("missing", found.missing)):
        click.echo(f"\n{title}:")
        for row in rows:
            click.echo(f"  {printable(str(row))}")
    for line in found.unreadable:
        click.echo(f"unreadable: {printable(line)}")


def _listed(plugin: str) -> tuple[Offer, Listing]:
    """Return an entry point of a plugin, and the names in the packages of its distribution.

    Raises:
        InputError: no installed plugin of vLLM has this name.
    """
    offers = [offer for offer in discover().offers if offer.stands_in in _GROUPS]
    meant = next((offer for offer in offers if offer.answers_to(plugin)), None)
    if meant is None:
        names = {offer.provider.name for offer in offers}
        known = ", ".join(sorted(names)) or "there is none"
        raise InputError(f"{plugin!r} is no installed plugin of vLLM: {known}")
    packages = {offer.package for offer in offers if offer.provider == meant.provider}
    return meant, listing_of(*sorted(packages))


def _offer_as_dict(offer: Offer, found: Listing) -> dict[str, object]:
    return {
        "distribution": offer.provider.to_dict(),
        "answered": {row.name: row.place for row in found.answered},
        "missing": {row.name: row.place for row in found.missing},
        "unreadable": list(found.unreadable),
    }


if __name__ == "__main__":
    main()
