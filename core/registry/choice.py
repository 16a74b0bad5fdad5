"""Choose the class that is constructed for an op: a pure function of declarations, a platform and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opgraft.config import Settings
from opgraft.decision import Candidate, Decision, Provider
from opgraft.errors import ConflictError
from opgraft.platform import Platform
from opgraft.registry.declarations import ANY_PLATFORM, Replacement
from opgraft.registry.op_classes import location_of
from opgraft.text import described


@dataclass(frozen=True)
class ReplacementChoice:
    """The class constructed for ``target``. ``rows`` pairs each active replacement with what speaks against it."""

    target: type
    own: Provider
    op_name: str | None
    rows: tuple[tuple[Replacement, str | None], ...]
    winner: Replacement | None

    @property
    def cls(self) -> type:
        return self.winner.cls if self.winner else self.target

    @property
    def provider(self) -> Provider:
        return self.winner.provider if self.winner else self.own

    @property
    def decision(self) -> Decision:
        own_reason = f"replaced by {self.cls.__qualname__}" if self.winner else "no active replacement applies"
        rows = [
            Candidate(r.cls.__qualname__, r is self.winner, self._verdict(r, against), r.provider, r.location)
            for r, against in self.rows
        ]
        rows.append(
            Candidate(self.target.__qualname__, self.winner is None, own_reason, self.own, location_of(self.target))
        )
        reason = f"provided by {_who(self.winner)}" if self.winner else own_reason
        subject = f"class of {self.target.__qualname__}"
        return Decision(subject, self.cls.__qualname__, reason, tuple(rows), _providers_setting(self.op_name))

    def _verdict(self, row: Replacement, against: str | None) -> str:
        if against or self.winner is None:
            return against or "not chosen"
        if row is self.winner:
            return f"active here, priority {row.priority}"
        return f"priority {row.priority} is below {self.winner.priority}"


def choose_replacement(
    target: type,
    op_name: str | None,
    own: Provider,
    active: Sequence[Replacement],
    platform: Platform,
    settings: Settings,
    kin: Sequence[Replacement] = (),
) -> ReplacementChoice:
    """Choose the active replacement, if any, constructed in place of ``target``, on ``platform`` under ``settings``.

    ``kin`` are the active replacements of other classes of the same op: a provider that ``providers`` asks for need
    serve one of them only.

    Raises:
        ConflictError: several apply at equal priority and ``providers`` does not choose, or chooses what is not there.
    """
    wanted = (settings.config.providers or {}).get(op_name or "")
    rows = tuple((r, objection_to(r, platform, wanted)) for r in active if r.target is target)
    eligible = [r for r, against in rows if against is None]
    best = max((r.priority for r in eligible), default=0)
    top = [r for r in eligible if r.priority == best]
    if len(top) > 1:
        choices = f"Choose with {_providers_setting(op_name, *(r.plugin or r.provider.name for r in top))}."
        if len({(r.provider, r.plugin) for r in top}) == 1:
            choices = "They have one provider, which decides by register_oot(priority=...) or unregister_oot."
        rivals = " and ".join(f"{r.cls.__qualname__} at {r.location} ({_who(r)})" for r in top)
        raise ConflictError(
            f"{len(top)} replacements of {target.__qualname__} have priority {best} on {platform.name}: {rivals}. "
            f"{choices}"
        )
    if wanted and not top and wanted != own.name and not any(wanted in (r.provider.name, r.plugin) for r in kin):
        offered = ", ".join(_who(r) for r, _ in rows) or "none"
        raise ConflictError(
            f"providers asks for {wanted!r} for {op_name!r}, which has no replacement of {target.__qualname__} that "
            f"applies on {platform.name} (active: {offered}; {own.name!r} keeps the op's own class)."
        )
    return ReplacementChoice(target, own, op_name, rows, top[0] if top else None)


def objection_to(replacement: Replacement, platform: Platform, wanted: str | None) -> str | None:
    """Say why a replacement does not apply here, or return ``None`` if it does."""
    if ANY_PLATFORM not in replacement.platforms and platform.name not in replacement.platforms:
        return f"applies on {', '.join(replacement.platforms)} only, this is {platform.name}"
    if wanted and wanted not in (replacement.provider.name, replacement.plugin):
        return f"providers asks for {wanted}"
    if replacement.when is not None:
        try:
            return None if replacement.when(platform) else "its when= condition is false here"
        except (Exception, SystemExit) as error:  # a plugin's code; the reason stays in the decision
            return f"its when= condition raised {described(error)}"
    return None


def _providers_setting(op_name: str | None, *names: str) -> str:
    plugins = " or ".join(map(repr, names)) or "<plugin>"
    return f"OpgraftConfig(providers={{{op_name or '<op name>'!r}: {plugins}}}) or OPGRAFT_PLUGINS_DISABLE=<plugin>"


def _who(replacement: Replacement) -> str:
    plugin = f", plugin {replacement.plugin}" if replacement.plugin else ""
    return f"{replacement.provider}{plugin}"
