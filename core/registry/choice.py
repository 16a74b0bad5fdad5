"""Choose the class that is constructed for an op: a pure function of declarations, a platform and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opgraft.config import NATIVE_CHOICE, Settings
from opgraft.decision import Candidate, Decision, Provider
from opgraft.environment import PLUGINS_DISABLE, PROVIDERS
from opgraft.errors import ConfigError, ConflictError, close_matches
from opgraft.platform import Platform
from opgraft.registry.declarations import ANY_PLATFORM, Replacement
from opgraft.registry.op_classes import location_of, qualified, told_apart

_NOT_ASKED = "providers asks for"


@dataclass(frozen=True)
class ReplacementChoice:
    """The class constructed for ``target``.

    ``rows`` pairs each active replacement with the objection to it. ``asked`` names the setting that chooses, if one
    does.
    """

    target: type
    own: Provider
    op_name: str | None
    rows: tuple[tuple[Replacement, str | None], ...]
    winner: Replacement | None
    asked: str = ""
    settings: Settings | None = field(default=None, compare=False, repr=False)

    @property
    def cls(self) -> type:
        return self.winner.cls if self.winner else self.target

    @property
    def provider(self) -> Provider:
        return self.winner.provider if self.winner else self.own

    @property
    def chosen(self) -> str:
        """The class and its provider, as processes tell each other what they construct."""
        return f"{qualified(self.cls)} of {self.provider}"

    @property
    def decision(self) -> Decision:
        kept = f"kept, as {self.asked}" if self.asked else "no active replacement applies"
        own_reason = f"replaced by {self._shown(self.cls)}" if self.winner else kept
        rows = [
            Candidate(
                self._shown(r.cls),
                r is self.winner,
                self._verdict(r, against),
                r.provider,
                r.location,
            )
            for r, against in self.rows
        ]
        rows.append(
            Candidate(
                self._shown(self.target),
                self.winner is None,
                own_reason,
                self.own,
                location_of(self.target),
            )
        )
        asked = f", as {self.asked}" if self.asked else ""
        reason = f"provided by {_who(self.winner)}{asked}" if self.winner else own_reason
        subject = f"class of {self.target.__qualname__}"
        return Decision(subject, self._shown(self.cls), reason, tuple(rows), self._setting())

    def _shown(self, cls: type) -> str:
        return told_apart(cls, (self.target, *(row.cls for row, _ in self.rows)))

    def _setting(self) -> str:
        """Say which setting would choose another class, or return "" where none does."""
        free = [
            choice_name(r)
            for r, no in self.rows
            if r is not self.winner and (no is None or no.startswith(_NOT_ASKED))
        ]
        if self.winner is None:
            return choosing(self.settings, self.op_name, free)
        return choosing(
            self.settings, self.op_name, [self.own.name, *free], choice_name(self.winner)
        )

    def _verdict(self, row: Replacement, against: str | None) -> str:
        if against or self.winner is None:
            return against or "not chosen"
        if row is self.winner:
            branch = (
                "; where its supports= is false of the arguments the op's own kernel runs"
                if row.supports
                else ""
            )
            return f"active here, priority {row.priority}{branch}"
        return f"priority {row.priority} is below {self.winner.priority}"


def choose_replacement(
    target: type,
    op_name: str | None,
    own: Provider,
    active: Sequence[Replacement],
    platform: Platform,
    settings: Settings,
    kin: Sequence[Replacement],
    absence_of: Callable[[str], str],
) -> ReplacementChoice:
    """Choose the active replacement, if any, constructed in place of ``target``, on ``platform`` under ``settings``.

    ``kin`` are the active replacements of other classes of the same op: a provider that ``providers`` asks for need
    serve one of them only. ``absence_of`` says why nothing of a provider is active, as far as that is known.

    Raises:
        ConflictError: several apply at equal priority and ``providers`` does not choose.
        ConfigError: ``providers`` chooses what is not there.
    """
    wanted = settings.chosen_provider(op_name)
    own_choices = (own.name, NATIVE_CHOICE)
    asked = f"{_NOT_ASKED} {wanted!r} for {op_name!r} ({settings.origins['providers']})"
    rows = tuple((r, objection_to(r, platform, wanted)) for r in active if r.target is target)
    eligible = [r for r, against in rows if against is None]
    best = max((r.priority for r in eligible), default=0)
    top = sorted(
        (r for r in eligible if r.priority == best), key=lambda r: r.provider.name
    )  # not as they were loaded
    if len(top) > 1:
        choices = f"Choose by {choosing(settings, op_name, [choice_name(r) for r in top], choice_name(top[0]))}."
        # Settings name providers and plugins, so none tells these apart.
        if len({(r.provider, r.plugin) for r in top}) == 1:
            choices = "They have one provider, which decides by register_oot(priority=...) or unregister_oot."
        rivals = " and ".join(f"{r.cls.__qualname__} at {r.location} ({_who(r)})" for r in top)
        raise ConflictError(
            f"{len(top)} replacements of {target.__qualname__} have priority {best} on {platform.name}: {rivals}. "
            f"{choices}"
        )
    # Passed over, the native kernel would run without a word where a plugin's was asked for.
    if (
        wanted
        and not top
        and wanted not in own_choices
        and not any(wanted in (r.provider.name, r.plugin) for r in kin)
    ):
        absence = absence_of(wanted)
        offered = ", ".join(_who(r) for r, _ in rows) or "none"
        known = {*own_choices, *(choice_name(r) for r in (*(r for r, _ in rows), *kin))}
        raise ConfigError(
            f"{asked}, which has no replacement of {target.__qualname__} that applies on {platform.name}"
            f"{f', as {absence}. Mend that, or choose another' if absence else ''} "
            f"(active: {offered}; {own.name!r} keeps the op's own class, {NATIVE_CHOICE!r} runs its native "
            f"definition): {close_matches(wanted, known)}"
        )
    elsewhere = "" if top or wanted in own_choices else ", which serves other classes of that op"
    why = f"{asked}{elsewhere}" if wanted else ""
    return ReplacementChoice(target, own, op_name, rows, top[0] if top else None, why, settings)


def objection_to(replacement: Replacement, platform: Platform, wanted: str | None) -> str | None:
    """Say why a replacement does not apply here, or return ``None`` if it does."""
    if ANY_PLATFORM not in replacement.platforms and platform.name not in replacement.platforms:
        return f"applies on {', '.join(replacement.platforms)} only, this is {platform.name}"
    if wanted and wanted not in (replacement.provider.name, replacement.plugin):
        return f"{_NOT_ASKED} {wanted}"
    return replacement.objection_on(platform)


def choosing(
    settings: Settings | None, op_name: str | None, names: Sequence[str], dispensable: str = ""
) -> str:
    """Say how to choose the first of ``names``, in each form that a user may paste, or to go without a plugin.

    A class that derives from no registered op has no name for ``providers``.
    """
    ways = []
    if op_name and names:
        first, *others = dict.fromkeys(names)
        python = f"OpgraftConfig(providers={{{op_name!r}: {first!r}}})"
        likewise = f", likewise {' and '.join(others)}" if others else ""
        way = f"{PROVIDERS}={op_name}={first}, --providers {op_name}={first} or {python}{likewise}"
        if settings:
            asked = settings.chosen_provider(op_name)
            way = settings.to_change("providers", way, "" if asked else f"{op_name}={first}")
        ways.append(way)
    if dispensable:
        way = f"{PLUGINS_DISABLE}={dispensable}"
        ways.append(settings.to_change("plugins_disable", way, dispensable) if settings else way)
    return "; or ".join(ways)


def choice_name(replacement: Replacement) -> str:
    """Return the name of a replacement in ``providers``."""
    return replacement.plugin or replacement.provider.name


def _who(replacement: Replacement) -> str:
    plugin = f", plugin {replacement.plugin}" if replacement.plugin else ""
    return f"{replacement.provider}{plugin}"
