"""``opgraft plugins show``: one plugin or platform, with ``--load`` also the outcome of loading."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
from opgraft.base.text import printable
from opgraft.cli import evidence
from opgraft.cli.completion import offer_names
from opgraft.cli.contents import contents_of
from opgraft.cli.isolation import examined
from opgraft.cli.loading import load_all
from opgraft.cli.offers import (
    admission,
    as_dict,
    metadata_findings,
    misspelt_groups,
    problem_lines,
    shown_offers,
)
from opgraft.cli.output import (
    SettingsCommand,
    echo,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.cli.plugins_doctor import found
from opgraft.errors import InputError, close_matches
from opgraft.plugins.admission import change_since_locked, check_admission
from opgraft.plugins.discovery import PLUGIN_GROUP, Offer, discover, normalized
from opgraft.plugins.locking import lockfile
from opgraft.plugins.outcomes import end_of, replacements_of
from opgraft.registry.finding import Finding
from opgraft.registry.state import PluginRecord, PluginStatus, host_state

_EVIDENCE = {"evidence": "evidence", "judged": "judged on this machine"}

_REJECTED = PluginStatus.REJECTED.value

_ABSENT = {"identity": "signer: unknown", "evidence": "evidence: none"}
"""Lines about facts that help to judge whether a plugin is safe, if they are absent."""


@click.command("show", cls=SettingsCommand)
@click.argument("name", shell_complete=offer_names)
@click.option(
    "--load",
    is_flag=True,
    help="Load the plugins, in a child process, and show what became of this one.",
)
@json_option
@with_settings
def command(name: str, load: bool, as_json: bool) -> None:
    """Show a plugin or a platform, with --load also the outcome of loading.

    NAME is the name of a plugin, a platform or a distribution. Prints the metadata, the verdict of
    settings and lockfile, and faults, without an import. With --load, all plugins are loaded in a
    child process. Then the status, the registrations and the traceback of a failure are printed,
    too.
    """
    check_admission(host_state().settings())
    offers = _answering(name)
    if not offers:
        known = {offer.name for offer in shown_offers()}
        ignored = "".join(f" {line}" for line in problem_lines(misspelt_groups()))
        raise InputError(
            f"no installed plugin or platform is called {name!r}: "
            f"{close_matches(name, known)}{ignored} 'opgraft plugins doctor' tells what keeps an "
            "installed one from being found."
        )
    report = _loaded(name, offers) if load else _installed(offers)
    exit_code = report.pop("exit_code")
    if as_json:
        print_json("opgraft.plugins.show/3", report)
    else:
        found_below = [finding["message"] for finding in report["findings"]]
        for details in report["offers"]:
            _print_details(details, "\n".join(found_below))
        for finding in report["findings"]:
            print_wrapped(f"finding: {Finding.from_dict(finding)}")
        # What is rejected is not loaded either.
        if not load and any(details["status"] != _REJECTED for details in report["offers"]):
            print_wrapped(
                f"to load it, and see what becomes of it: opgraft plugins show {name} --load"
            )
    if report["error"]:
        click.echo(f"error: {printable(report['error'])}", err=True)
    sys.exit(exit_code)


def _answering(name: str) -> list[Offer]:
    return [offer for offer in shown_offers() if offer.answers_to(name)]


def _installed(offers: Sequence[Offer]) -> dict[str, Any]:
    """Report what is known of plugins and platforms without importing them."""
    providers = {offer.provider for offer in offers}
    findings = [finding for finding in metadata_findings() if finding.concerns(providers)]
    refusals = map(_refusal, offers)
    findings += [finding for finding in refusals if finding is not None]
    return _plain_data([_metadata(offer) for offer in offers], findings, None)


def _refusal(offer: Offer) -> Finding | None:
    """Return the finding about a plugin that settings reject; ``None`` if this is no fault."""
    status, reason = admission(offer, host_state().settings())
    if offer.group != PLUGIN_GROUP or status != _REJECTED:
        return None
    rejected = PluginStatus.REJECTED
    return end_of(PluginRecord(offer.name, offer.value, offer.provider, rejected, reason))


def _loaded(name: str, offers: Sequence[Offer]) -> dict[str, Any]:
    """Report the outcome of plugins and platforms in a child process that loads all."""
    outcome = examined(__name__, "examine", name)
    providers = {offer.provider for offer in offers}
    lost = []
    for finding in (*outcome.left_out, outcome.crash):
        if finding and finding.concerns(providers):
            lost.append(finding)
    # The child that gave the result went without a lost plugin, so the result says nothing of it.
    if outcome.result is None or lost:
        error = lost[0] if lost else outcome.crash
        return _plain_data([_metadata(offer) for offer in offers], [], error)
    report: dict[str, Any] = outcome.result
    return report


def examine(name: str) -> dict[str, Any]:
    """Load everything in this process. Return a name's offers and findings as plain data."""
    error = load_all()
    offers = _answering(name)
    findings = _findings(offers, loaded=error is None)
    details = [{**_metadata(offer), **_outcome(offer)} for offer in offers]
    told = Finding(str(error), exit_code=error.exit_code) if error else None
    return _plain_data(details, findings, told)


def _plain_data(
    offers: list[dict[str, Any]], findings: list[Finding], error: Finding | None
) -> dict[str, Any]:
    exit_codes = [finding.exit_code for finding in (*findings, error) if finding]
    return {
        "offers": offers,
        "findings": [finding.to_dict() for finding in findings],
        "error": error and error.message,
        "exit_code": max(exit_codes, default=0),
    }


def _findings(offers: Sequence[Offer], *, loaded: bool) -> list[Finding]:
    """Return the doctor's findings about some plugins and platforms, and their distributions."""
    names = {offer.name for offer in offers if offer.group == PLUGIN_GROUP}
    records = [record for name, record in host_state().plugins.items() if name in names]
    providers = {offer.provider for offer in offers}
    return [finding for finding in found(records, loaded=loaded) if finding.concerns(providers)]


def _print_details(details: dict[str, Any], below: str) -> None:
    """Print an offer. A reason in the findings ``below`` is not repeated."""
    for key, value in details.items():
        if key == "lock" and value and value in below:
            echo("lock: refused, see the finding")
        elif key == "reason" and value and value in below:
            continue
        elif key == "traceback":
            # With an indent on each line, so that no text of a traceback can forge other lines.
            print_wrapped((value or "").splitlines(), indent="  | ")
        elif key == "contents" and value:
            print_wrapped(_contents_in_words(value, below, is_editable=details["editable"]))
        elif key == "identity" and value:
            print_wrapped(
                f"signed by: {value['source']} ({value['build']}), says {value['issuer']}; checked "
                "when it was locked"
            )
        elif key in ("evidence", "judged") and value:
            print_wrapped(f"{_EVIDENCE[key]}: {_evidence_in_words(value)}")
        elif key in _ABSENT and details["contents"]:
            echo(_ABSENT[key])
        elif value:
            print_wrapped(f"{key.replace('_', ' ')}: {_in_words(value)}")
    echo()


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['name']} {value['version']}"
    if isinstance(value, list):
        return ", ".join(_replacement(item) if isinstance(item, dict) else item for item in value)
    return "yes" if value is True else str(value)


def _contents_in_words(contents: dict[str, Any], below: str, *, is_editable: bool) -> Iterator[str]:
    """Yield lines about the installed files of a distribution."""
    damage = contents["damage"]
    state = damage or "as RECORD lists them"
    if damage and damage in below:
        state = "not as RECORD lists them, see the finding"
    yield f"files: {contents['files']} of {contents['bytes']:,} bytes: {state}"
    for library in contents["libraries"]:
        unread = library["problem"] or "is no ELF file"
        links = library["links"]
        told = unread if links is None else f"links {', '.join(links) or 'nothing'}"
        yield f"native library: {library['file']} {told}"
    if not contents["libraries"]:
        # RECORD does not list the files of an editable install.
        is_known = contents["files"] and not is_editable
        yield f"native libraries: {'none' if is_known else 'unknown'}"
    yield f"publisher: {contents['publisher'] or 'none'}, as the metadata says"


def _evidence_in_words(shown: dict[str, Any]) -> str:
    if shown["problem"]:
        return str(shown["problem"])
    counts = ", ".join(f"{count} {status}" for status, count in shown["counts"].items())
    versions = ", ".join(f"{name} {version}" for name, version in shown["versions"].items())
    whole = "" if shown["complete"] else ", not all asked"
    day = f", {shown['date']}" if shown["date"] else ""
    provider = _in_words(shown["provider"])
    device = f"{shown['platform']} ({shown['device']})"
    outdated = f"not of what is here ({shown['outdated']}): " if shown["outdated"] else ""
    return f"{outdated}{counts}{whole}; {provider} on {device}, {versions}{day}"


def _replacement(row: dict[str, Any]) -> str:
    state = "" if row["active"] else " (not active)"
    return f"{row['target']} -> {row['class']} at {row['location']}{state}"


def _metadata(offer: Offer) -> dict[str, Any]:
    """Return the facts about an offer that need no import."""
    settings = host_state().settings()
    status, reason = admission(offer, settings)
    distribution = discover().distributions.get(offer.provider)
    kept_as = offer.name if offer.built_in else normalized(offer.provider.name)
    return {
        **as_dict(offer),
        "requires": list(offer.requires),
        "lock": _lock_state(offer),
        "contents": contents_of(distribution) if distribution else None,
        "identity": _identity(offer),
        "evidence": None if offer.built_in else evidence.shipped(offer.module, offer.provider),
        "judged": evidence.kept(kept_as, offer.provider),
        "status": status,
        "reason": reason,
    }


def _identity(offer: Offer) -> dict[str, str] | None:
    """Return the signer of the wheel of an offer, by the lockfile, without the attestation.

    If the installed files differ from the lockfile, the answer is ``None``: the signature is about
    other files.
    """
    settings = host_state().settings()
    path = settings.config.lockfile
    if path is None:
        return None
    row = lockfile(path, settings.origins["lockfile"]).rows.get(normalized(offer.provider.name))
    if row is None or row.identity is None or change_since_locked(offer, settings):
        return None
    return {key: value for key, value in row.identity.items() if key != "attestation"}


def _lock_state(offer: Offer) -> str | None:
    """Return words for the offer's change since the lockfile; ``None`` without a lockfile.

    Offers of opgraft itself are not locked.
    """
    settings = host_state().settings()
    if offer.built_in or settings.config.lockfile is None:
        return None
    return change_since_locked(offer, settings) or f"as it is in {settings.config.lockfile}"


def _outcome(offer: Offer) -> dict[str, Any]:
    """Return the outcome of a loaded plugin. For a platform, there are findings only."""
    record = host_state().plugins.get(offer.name) if offer.group == PLUGIN_GROUP else None
    if record is None:
        return {}
    replacements = []
    for each in replacements_of(record):
        row = {
            "target": each.asked_for,
            "class": each.cls.__qualname__,
            "location": each.location,
            "active": each in host_state().active,
        }
        replacements.append(row)
    return {
        "status": record.status.value,
        "reason": record.reason,
        "platforms": list(record.platforms),
        "replacements": replacements,
        "traceback": record.traceback,
    }
