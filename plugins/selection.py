"""The choice of this process's platform. No torch is imported before the class is loaded.

The way from ``current_platform()`` to the platform:

1. ``selected_platform`` answers from the state of the process. The first call holds the loading
   lock and calls ``_select``.
2. ``_select`` calls ``_first_usable``: candidates in turn, until the class of one can be used.
3. ``decide_platform`` picks a candidate without the class: ``_ask_each`` asks the probes of all
   offers without an objection, and ``_winner`` compares the answers with the settings.
4. ``load_platform`` of ``platform_class.py`` loads the class of the candidate.

``decide_without_torch`` goes the same way, but reads the source of the class in place of step 4.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from opgraft.base.log import logger
from opgraft.config import Settings
from opgraft.config.environment import PLATFORM
from opgraft.errors import PlatformConflictError, PlatformError, close_matches
from opgraft.machine.evidence import Evidence
from opgraft.machine.machine import Machine
from opgraft.platform import Platform, PlatformSpec
from opgraft.plugins.admission import check_admission, objection, quarantined
from opgraft.plugins.discovery import PLATFORM_GROUP, Offer, discover
from opgraft.plugins.platform_class import load_platform, report
from opgraft.plugins.probing import ProbeFailed, ask_all
from opgraft.plugins.requirements import FAULTS, QUARANTINED
from opgraft.registry.decision import NOT_PROBED, Candidate, Decision
from opgraft.registry.finding import Finding
from opgraft.registry.state import (
    ACTIVATING,
    PlatformSelection,
    holding_the_loading_lock,
    host_state,
)

Result = TypeVar("Result")

_SETTING = f"{PLATFORM}=<name>, --platform <name> or OpgraftConfig(platform=<name>)"


@dataclass(frozen=True)
class _ProbedPlatform:
    """An offered platform with the answer of its probe. No ``evidence`` has a ``reason``."""

    offer: Offer
    evidence: Evidence | None
    reason: str
    failed: bool = False

    @property
    def available(self) -> bool:
        return self.evidence is not None and self.evidence.available

    def candidate(self, accepted: bool, reason: str) -> Candidate:
        return Candidate(
            self.offer.name, accepted, reason, self.offer.provider, self.offer.value, self.evidence
        )


def current_platform() -> Platform:
    """Return the platform of this process, decided on first use.

    Raises:
        PlatformError: the platform asked for does not exist, is unavailable or cannot be loaded, or
            a ``set_config`` scope asks for another one than the process already uses.
        PlatformConflictError: two out-of-tree platforms are available and no setting chooses.
    """
    return selected_platform().platform


def selected_platform() -> PlatformSelection:
    """Return the platform of this process with its decision. Raises as ``current_platform``."""
    state = host_state()
    if state.selection is None:
        with holding_the_loading_lock(state):
            if state.selection is None:
                _expect_no_platform_asks()
                state.selection = _select(state.settings(), Machine())
                decision = state.selection.decision
                logger.debug("%s", decision.summary(), extra=decision.attributes())
                # The platform's defaults are a layer of the settings from here on.
                state.invalidate()
    if not state.current_caches().platform_agrees:
        _expect_agreement(state.shared_settings(), state.selection)
        state.current_caches().platform_agrees = True
    return state.selection


def _expect_no_platform_asks() -> None:
    """Refuse a platform that asks for the platform of the process while its class is loaded."""
    transaction = ACTIVATING.get()
    if transaction is not None and transaction.owner.kind == "platform":
        raise PlatformError(
            f"{transaction.owner} asks for the platform of this process while its own class is "
            "loaded, by current_platform() or by constructing an op: leave that to its method "
            "prepare(), or to the first call that needs it"
        )


def _expect_agreement(settings: Settings, selection: PlatformSelection) -> None:
    wanted = settings.config.platform
    if wanted is not None and wanted != selection.platform.name:
        raise PlatformError(
            f"{settings.origins['platform']} asks for platform {wanted!r}, but this process "
            f"already uses {selection.platform.name!r}: it is decided once. Set it before the "
            "first op is constructed, or call opgraft.reset() first."
        )


def decide_platform(
    settings: Settings, machine: Machine, unloadable: Sequence[tuple[Offer, str]] = ()
) -> tuple[Offer, Decision]:
    """Choose a platform: that of the settings, else an out-of-tree one, else built-in by priority.

    ``unloadable`` has offers that were chosen before, and the reasons why their classes could not
    be loaded.

    Raises:
        ConfigError: a plugin on the allow list is not installed, or the lockfile cannot be used.
        PlatformError: the platform asked for does not exist or is not available, or none is
            available.
        PlatformConflictError: two out-of-tree platforms are available and no setting chooses.
    """
    check_admission(settings)
    config = settings.config
    offers = discover().of_group(PLATFORM_GROUP)
    wanted = config.platform
    names = [offer.name for offer in offers]
    if wanted is not None and wanted not in names:
        raise PlatformError(
            f"{settings.origins['platform']} asks for platform {wanted!r}, which no installed "
            f"distribution offers: {close_matches(wanted, names)} "
            "Install its plugin, or leave the setting out to have the platform detected."
        )
    broken = {offer.name: reason for offer, reason in unloadable}
    asked = _ask_each(offers, broken, settings, machine)
    if config.strict:
        _raise_first_failure(asked)
    winner, reason = _winner(asked, settings)
    candidates = tuple(_candidate(each, winner) for each in asked)
    setting = settings.to_change("platform", _SETTING)
    return winner.offer, Decision("platform", winner.offer.name, reason, candidates, setting)


def _ask_each(
    offers: Sequence[Offer], broken: Mapping[str, str], settings: Settings, machine: Machine
) -> list[_ProbedPlatform]:
    """Ask the probes of all offers without an objection.

    ``broken`` has the names of unusable offers, with the reasons.
    """
    unasked: dict[Offer, _ProbedPlatform | None] = {}
    for offer in offers:
        if offer.name in broken:
            unasked[offer] = _ProbedPlatform(offer, None, broken[offer.name], failed=True)
        else:
            unasked[offer] = _passed_over(offer, settings)
    asked = [offer for offer in offers if unasked[offer] is None]
    answers = dict(zip(asked, ask_all(asked, machine), strict=True))
    return [unasked[offer] or _answered(offer, answers[offer], settings) for offer in offers]


def _passed_over(offer: Offer, settings: Settings) -> _ProbedPlatform | None:
    """Return an offer without an answer, with the reason; ``None`` if the probe is to be asked."""
    config = settings.config
    if config.platform is not None and offer.name != config.platform:
        return _ProbedPlatform(
            offer, None, f"{NOT_PROBED}platform {config.platform!r} was asked for"
        )
    refused = objection(offer, settings)
    if not refused:
        return None
    failed = refused.startswith(FAULTS)
    if failed and offer.name != config.platform and not config.strict:
        report(_left_out(offer, refused, 4 if refused.startswith(QUARANTINED) else 1))
    return _ProbedPlatform(offer, None, refused, failed)


def _answered(offer: Offer, answer: Evidence | Exception, settings: Settings) -> _ProbedPlatform:
    """Return an offer with the answer of its probe.

    Raises:
        OpgraftError: the probe may not be asked here.
    """
    config = settings.config
    if isinstance(answer, Evidence):
        return _ProbedPlatform(offer, answer, answer.reason)
    if not isinstance(answer, ProbeFailed):
        raise answer
    if offer.name != config.platform and not config.strict:
        # This failure may have put the provider into quarantine.
        exit_code = 4 if quarantined(offer.provider) else 1
        report(_left_out(offer, str(answer), exit_code, answer.location))
    return _ProbedPlatform(offer, None, str(answer), failed=True)


def _left_out(offer: Offer, why: str, exit_code: int, location: str | None = None) -> Finding:
    message = f"platform {offer.name!r} of {offer.provider} is left out: {why}"
    return Finding(message, offer.provider, location, exit_code=exit_code)


def _conflict(out_of_tree: Sequence[_ProbedPlatform]) -> PlatformConflictError:
    """Make the error about several available platforms that are not built in."""
    first, *others = [each.offer.name for each in out_of_tree]
    rows = [f"{each.offer.name} ({each.offer.provider}: {each.reason})" for each in out_of_tree]
    return PlatformConflictError(
        f"{len(out_of_tree)} out-of-tree platforms are available: {' and '.join(rows)}. Choose by "
        f"{PLATFORM}={first}, --platform {first} or OpgraftConfig(platform={first!r}), "
        f"likewise {' and '.join(others)}."
    )


def _winner(asked: Sequence[_ProbedPlatform], settings: Settings) -> tuple[_ProbedPlatform, str]:
    wanted = settings.config.platform
    if wanted is not None:
        chosen = next(a for a in asked if a.offer.name == wanted)
        if not chosen.available:
            raise PlatformError(
                f"{settings.origins['platform']} asks for platform {wanted!r} "
                f"({chosen.offer.provider}), which cannot be used here: {chosen.reason}. "
                f"{_remedy(chosen)}Unset it to have the platform detected."
            )
        return chosen, f"asked for by {settings.origins['platform']}; {chosen.reason}"
    available = [a for a in asked if a.available]
    out_of_tree = [a for a in available if not a.offer.built_in]
    if len(out_of_tree) > 1:
        raise _conflict(out_of_tree)
    if out_of_tree:
        return out_of_tree[0], f"the one out-of-tree platform available; {out_of_tree[0].reason}"
    if not available:
        reasons = "; ".join(f"{a.offer.name}: {a.reason}" for a in asked)
        raise PlatformError(f"no platform is available: {reasons}")
    # Beside a GPU, the CPU is available, too.
    best = max(available, key=lambda a: _priority(a.offer))
    return best, f"no out-of-tree platform available; {best.reason}"


def _candidate(asked: _ProbedPlatform, winner: _ProbedPlatform) -> Candidate:
    if asked is winner:
        return asked.candidate(True, asked.reason)
    return asked.candidate(False, _loser_reason(asked, winner))


def _remedy(asked: _ProbedPlatform) -> str:
    if asked.evidence is None or not asked.evidence.remedy:
        return ""
    return f"To use it: {asked.evidence.remedy}. "


def _loser_reason(asked: _ProbedPlatform, winner: _ProbedPlatform) -> str:
    if not asked.available:
        return asked.reason
    return f"{asked.reason}, but {winner.offer.name} comes first"


def _priority(built_in: Offer) -> int:
    spec: PlatformSpec = built_in.load()
    return spec.priority


def _raise_first_failure(asked: Sequence[_ProbedPlatform]) -> None:
    for each in asked:
        if each.failed:
            offer = each.offer
            raise PlatformError(
                f"strict mode: platform {offer.name} of {offer.provider}: {each.reason}"
            )


def _withdraw_all_but(chosen: str) -> None:
    """Take back the declarations of platforms in use before ``reset``."""
    state = host_state()
    for owner in list(state.registry.owned):
        if owner.kind == "platform" and owner.name != chosen:
            state.withdraw_declarations(owner)


def decide_without_torch(settings: Settings, machine: Machine) -> tuple[Decision, str]:
    """Decide without torch, as far as possible, as a process with torch will.

    Returns:
        The decision, and a list of questions about the chosen platform; empty if all are answered.

    Raises:
        OpgraftError: as ``decide_platform``; the class of a platform that was asked for cannot be
            used.
    """
    return _first_usable(settings, machine, _verified)


def _verified(offer: Offer) -> str:
    if offer.built_in:
        return ""
    # Few machines have a platform to look at.
    found = importlib.import_module("opgraft.plugins.class_source").verify(offer)
    if found.fault is not None:
        raise PlatformError(
            f"the class of platform {offer.name!r} ({offer.provider}, {offer.value}) cannot be "
            f"used: {found.fault}"
        )
    unknown: str = found.unknown
    return unknown


def _select(settings: Settings, machine: Machine) -> PlatformSelection:
    decision, (platform, defaults) = _first_usable(settings, machine, load_platform)
    _withdraw_all_but(platform.name)
    return PlatformSelection(platform, decision, defaults)


def _first_usable(
    settings: Settings, machine: Machine, use: Callable[[Offer], Result]
) -> tuple[Decision, Result]:
    """Return the decision for the first platform that ``use`` accepts, and the result of ``use``.

    If a detected platform cannot be used, warn and try the next one.
    """
    unloadable: list[tuple[Offer, str]] = []
    while True:
        offer, decision = decide_platform(settings, machine, unloadable)
        try:
            return decision, use(offer)
        except PlatformError as error:
            if settings.config.platform == offer.name or settings.config.strict or offer.built_in:
                raise
            message = f"platform {offer.name!r} is left out: {error}"
            report(Finding(message, offer.provider, error.location))
            unloadable.append((offer, str(error)))
