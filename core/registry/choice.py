"""Choose the class to construct for an op, by declarations, platform and settings alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opgraft.config import NATIVE_CHOICE, Settings
from opgraft.config.environment import PLUGINS_DISABLE, PROVIDERS
from opgraft.errors import ConfigError, ConflictError, close_matches
from opgraft.platform import Platform
from opgraft.registry.decision import Candidate, Decision, Provider
from opgraft.registry.declarations import ANY_PLATFORM, Replacement
from opgraft.registry.op_classes import location_of, qualified, told_apart

_ASKS_FOR = "providers asks for"


class NotAskedFor(str):
    """The objection to a replacement that ``providers`` asks for another provider."""


@dataclass(frozen=True)
class ReplacementChoice:
    """The choice of the class to construct for ``target``: a replacement, or ``target`` itself.

    Attributes:
        target: the class that is called.
        own: the provider of the target.
        op_name: the name of the op in settings, or ``None``.
        rows: each active replacement of the target, with the objection or ``None``.
        winner: the replacement to construct; ``None`` keeps the target.
        asked: the setting that has chosen, in words; empty if none has.
        settings: the settings of the choice.
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
        """The class to construct."""
        return self.winner.cls if self.winner else self.target

    @property
    def provider(self) -> Provider:
        return self.winner.provider if self.winner else self.own

    @property
    def chosen(self) -> str:
        """The class and the provider in words. Processes compare these words."""
        return f"{qualified(self.cls)} of {self.provider}"

    @property
    def decision(self) -> Decision:
        asked = f", as {self.asked}" if self.asked else ""
        if self.winner:
            reason = f"provided by {_who(self.winner)}{asked}"
            own_reason = f"replaced by {self._shown(self.cls)}"
        else:
            reason = f"kept{asked}" if asked else "no active replacement applies"
            own_reason = reason
        candidates = [self._candidate(row, against) for row, against in self.rows]
        # The op's own class is an option too. Only this row shows why it was passed over.
        own_class = Candidate(
            name=self._shown(self.target),
            accepted=self.winner is None,
            reason=own_reason,
            provider=self.own,
            location=location_of(self.target),
        )
        return Decision(
            subject=f"class of {self.target.__qualname__}",
            chosen=self._shown(self.cls),
            reason=reason,
            candidates=(*candidates, own_class),
            setting=self._setting(),
        )

    def _candidate(self, row: Replacement, against: str | None) -> Candidate:
        return Candidate(
            name=self._shown(row.cls),
            accepted=row is self.winner,
            reason=self._verdict(row, against),
            provider=row.provider,
            location=row.location,
        )

    def _shown(self, cls: type) -> str:
        return told_apart(cls, (self.target, *(row.cls for row, _ in self.rows)))

    def _setting(self) -> str:
        """Return the setting to choose another class, in words; empty if none does."""
        free = []
        for row, against in self.rows:
            # Any other objection holds whatever the settings say.
            settings_decide = against is None or isinstance(against, NotAskedFor)
            if row is not self.winner and settings_decide:
                free.append(choice_name(row))
        if self.winner is None:
            return choosing(self.settings, self.op_name, free)
        names = [self.own.name, *free]
        return choosing(self.settings, self.op_name, names, choice_name(self.winner))

    def _verdict(self, row: Replacement, against: str | None) -> str:
        if against or self.winner is None:
            return against or "not chosen"
        if row is self.winner:
            return f"active here, priority {row.priority}"
        return f"priority {row.priority} is below {self.winner.priority}"


def _best(eligible: Sequence[Replacement]) -> list[Replacement]:
    """Return the replacements of the highest priority."""
    highest = max((each.priority for each in eligible), default=0)
    return [each for each in eligible if each.priority == highest]


def settled(
    settings: Settings,
    target: type,
    *,
    op_name: str | None,
    own: Provider,
    active: Sequence[Replacement],
    platform: Platform,
    other_replacements: Sequence[Replacement],
) -> Settings:
    """Return the settings with one provider of the op, if ``providers`` has a list for the op.

    The first name with an active replacement of ``target`` that applies is chosen, then the first
    one with a replacement of another class of the op. The native definition and the op's own class
    always apply. If no name applies, the last one is chosen, and ``choose_replacement`` raises its
    error.

    The arguments are those of ``choose_replacement``.
    """
    wanted = settings.wanted_providers(op_name)
    if op_name is None or len(wanted) < 2:
        return settings
    of_target = [each for each in active if each.target is target]

    def applies(name: str) -> bool:
        # Both run the op's own class, so they need no replacement.
        if name in (own.name, NATIVE_CHOICE):
            return True
        return any(objection_to(each, platform, name) is None for each in of_target)

    def serves_others(name: str) -> bool:
        return any(_is_of(name, each) for each in other_replacements)

    fitting = [*filter(applies, wanted), *filter(serves_others, wanted)]
    chosen = fitting[0] if fitting else wanted[-1]
    listed = "/".join(wanted)
    why = f"the first of {listed} that applies" if fitting else f"none of {listed} applies"
    return settings.with_provider(op_name, chosen, f"{why}, {settings.origins['providers']}")


def choose_replacement(
    target: type,
    *,
    op_name: str | None,
    own: Provider,
    active: Sequence[Replacement],
    platform: Platform,
    settings: Settings,
    other_replacements: Sequence[Replacement],
    absence_of: Callable[[str], str],
) -> ReplacementChoice:
    """Choose the active replacement to construct in place of ``target``.

    Args:
        target: the class that is called.
        op_name: the name of the op in settings, or ``None``.
        own: the provider of ``target``.
        active: the replacements of active plugins, for any class.
        platform: the current platform.
        settings: the current settings.
        other_replacements: the active replacements of other classes of the same op. A provider in
            ``providers`` may serve one of these instead.
        absence_of: returns the reason why a provider has nothing active; empty if not known.

    Returns:
        The choice. Without a replacement that applies, the choice keeps ``target``.

    Raises:
        ConflictError: several replacements apply at equal priority, and ``providers`` does not
            choose.
        ConfigError: ``providers`` names a provider without a replacement here.
    """
    settings = settled(
        settings,
        target,
        op_name=op_name,
        own=own,
        active=active,
        platform=platform,
        other_replacements=other_replacements,
    )
    wanted = settings.chosen_provider(op_name)
    of_target = [each for each in active if each.target is target]
    rows = tuple((each, objection_to(each, platform, wanted)) for each in of_target)
    best = _best([each for each, objection in rows if objection is None])
    # The order of loading must not decide.
    if len(best) > 1:
        raise _conflict(best, target, op_name, platform, settings)

    winner = best[0] if best else None
    why = ""
    if wanted:
        why = f"{_ASKS_FOR} {wanted!r} for {op_name!r} ({settings.origins['providers']})"
    if wanted and winner is None and wanted not in (own.name, NATIVE_CHOICE):
        # Without the error, the native kernel would run in silence in place of the plugin's.
        if not any(_is_of(wanted, each) for each in other_replacements):
            raise _missing(
                asked=why,
                wanted=wanted,
                target=target,
                own=own,
                of_target=of_target,
                other_replacements=other_replacements,
                platform=platform,
                absence=absence_of(wanted),
            )
        why += ", which serves other classes of that op"
    return ReplacementChoice(
        target=target,
        own=own,
        op_name=op_name,
        rows=rows,
        winner=winner,
        asked=why,
        settings=settings,
    )


def _conflict(
    rivals: Sequence[Replacement],
    target: type,
    op_name: str | None,
    platform: Platform,
    settings: Settings,
) -> ConflictError:
    """Return the error about replacements of one class with the same priority."""
    # By name: the order of loading may differ from run to run.
    ordered = sorted(rivals, key=lambda each: each.provider.name)
    names = [choice_name(each) for each in ordered]
    advice = f"Choose by {choosing(settings, op_name, names, names[0])}."
    # Settings name providers and plugins, so none tells these apart.
    if len({(each.provider, each.plugin) for each in ordered}) == 1:
        advice = (
            "They have one provider, which decides by register_oot(priority=...) or unregister_oot."
        )
    places = [f"{each.cls.__qualname__} at {each.location} ({_who(each)})" for each in ordered]
    return ConflictError(
        f"{len(ordered)} replacements of {target.__qualname__} have priority {ordered[0].priority} "
        f"on {platform.name}: {' and '.join(places)}. {advice}"
    )


def _missing(
    *,
    asked: str,
    wanted: str,
    target: type,
    own: Provider,
    of_target: Sequence[Replacement],
    other_replacements: Sequence[Replacement],
    platform: Platform,
    absence: str,
) -> ConfigError:
    """Return the error about a provider in ``providers`` without a replacement for the op."""
    offered = ", ".join(map(_who, of_target)) or "none"
    replacements = (*of_target, *other_replacements)
    known = {own.name, NATIVE_CHOICE, *map(choice_name, replacements)}
    mend = f", as {absence}. Mend that, or choose another" if absence else ""
    return ConfigError(
        f"{asked}, which has no replacement of {target.__qualname__} that applies on "
        f"{platform.name}{mend} (active: {offered}; {own.name!r} keeps the op's own class, "
        f"{NATIVE_CHOICE!r} runs its native definition): {close_matches(wanted, known)}"
    )


def _is_of(wanted: str, replacement: Replacement) -> bool:
    """Return True if a name in ``providers`` is the provider or the plugin of a replacement."""
    return wanted in (replacement.provider.name, replacement.plugin)


def objection_to(replacement: Replacement, platform: Platform, wanted: str | None) -> str | None:
    """Return the reason why a replacement does not apply here, ``None`` if it does.

    Args:
        replacement: the replacement.
        platform: the current platform.
        wanted: the provider that settings ask for, or ``None``.
    """
    # First the platform: a decision advises to ask for replacements with the objection NotAskedFor.
    if ANY_PLATFORM not in replacement.platforms and platform.name not in replacement.platforms:
        return f"applies on {', '.join(replacement.platforms)} only, this is {platform.name}"
    if wanted and not _is_of(wanted, replacement):
        return NotAskedFor(f"{_ASKS_FOR} {wanted}")
    # Last the condition, which may be slow or faulty code of a plugin that the user avoids.
    return replacement.objection_on(platform)


def choosing(
    settings: Settings | None, op_name: str | None, names: Sequence[str], dispensable: str = ""
) -> str:
    """Describe how to choose a provider, in each form for a user to paste.

    Args:
        settings: the current settings, or ``None``.
        op_name: the name of the op. Without a registered name, ``providers`` cannot choose.
        names: the providers; the first one is chosen.
        dispensable: a plugin to go without, as another way; empty for none.
    """
    ways = []
    if op_name and names:
        # One plugin may have several replacements of the op. Its name is enough once.
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
