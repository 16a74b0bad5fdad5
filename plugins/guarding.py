"""Setting back changes of the process by the code of plugins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.plugins.changes import Change
from opgraft.plugins.definitions import DEFINITIONS, OF_PLUGINS, module_of
from opgraft.plugins.discovery import discover
from opgraft.plugins.outcomes import may_patch_torch
from opgraft.plugins.process import (
    Look,
    changes_between,
    look,
    look_at_imports,
    look_at_lists,
    look_at_others,
)
from opgraft.plugins.remarks import PLATFORM_FINDINGS
from opgraft.registry import watching
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.op_classes import location_of
from opgraft.registry.state import host_state


class Guard:
    """Compares the process before and after each step of a sequence.

    A look takes time. So the look after one step also serves as the look before the next, unless a
    module was imported or ``forget`` was called in between.
    """

    def __init__(self) -> None:
        self._seen: Look | None = None
        self._modules = 0

    def forget(self) -> None:
        """Look anew before the next step."""
        self._seen = None

    @contextmanager
    def watching(
        self,
        when: str,
        stays: Callable[[Change], bool],
        report: Callable[[Sequence[Change], Sequence[str]], None],
    ) -> Iterator[None]:
        """Set back the changes that a step makes for others. The step may raise.

        Args:
            when: the step, in words.
            stays: returns True for a change that stays, although others meet the change.
            report: receives the changes that stay, and sentences about the others. The call comes
                when everything is set back, so that the handlers of logs are the former ones.
        """
        if self._seen is None or len(sys.modules) != self._modules:
            self._seen = look()
        before = self._seen
        try:
            with DEFINITIONS.imports_read(), OF_PLUGINS.imports_read():
                yield
        finally:
            kept, told = list[Change](), list[str]()
            seen: Look = ()
            is_as_seen = True
            for look_at in (look_at_lists, look_at_imports, look_at_others):
                now = look_at()
                seen += now
                for change in changes_between(before, now):
                    if change.stays or stays(change):
                        kept.append(change)
                        continue
                    undone = change.set_back()
                    is_as_seen = False
                    if not change.harmless:
                        told.append(f"changed {change.what} {when}: {undone}")
            self._seen = seen if is_as_seen else None
            self._modules = len(sys.modules)
            report(kept, told)


@contextmanager
def definitions_kept(what: str, provider: Provider, code: object) -> Iterator[list[str]]:
    """Put back what a plugin replaces in opgraft and torch while a step runs, which may raise.

    Yields:
        A list that has what was put back, in words, once the step has ended.
    """
    told = list[str]()
    if not _is_installed(provider):
        yield told
        return
    before = DEFINITIONS.read()
    try:
        with DEFINITIONS.imports_read():
            yield told
    finally:
        for change in DEFINITIONS.changes(before, DEFINITIONS.read()):
            if not (change.patch and may_patch_torch(provider)):
                told.append(f"{what} changed {change.what}: {change.set_back()}")
        for words in told:
            tell(Finding(words, provider, location_of(code)))


def _is_installed(provider: Provider) -> bool:
    """Return True if a distribution brings a plugin or a platform, other than opgraft itself."""
    discovery = discover()
    return discovery.has_plugin(provider) or bool(discovery.platforms_of(provider))


class LatePatches:
    """Puts back functions that plugins replace after they were loaded.

    The functions are those of opgraft, of torch and of other plugins. Only replacements by plugins
    and platforms count, as other code runs meanwhile.
    """

    def __init__(self) -> None:
        # A process without plugins does not wait for any look.
        is_alone = all(offer.built_in for offer in discover().offers)
        aspects = () if is_alone else (DEFINITIONS, OF_PLUGINS)
        self._before = {each: each.read(takes_imports=False) for each in aspects}
        self._calls = 0
        self._next_look = 1

    def look_after_call(self) -> None:
        """Look after the calls 1, 8, 64 and so on, since a look takes milliseconds."""
        self._calls += 1
        if self._calls == self._next_look:
            self._next_look *= 8
            self.look("while a model ran")

    def look(self, when: str) -> None:
        """Put back the patches since the first look, and tell of each. Raises nothing.

        Args:
            when: the occasion, in words.
        """
        try:
            self._put_back(when)
        # The call has a result or an error of its own, which a faulty object must not replace.
        except Exception as error:
            logger.warning("the look for patches %s ended: %s", when, described(error))

    def _changes(self) -> Iterator[Change]:
        for aspect, before in self._before.items():
            yield from aspect.changes(before, aspect.read(takes_imports=False))

    def _put_back(self, when: str) -> None:
        undone = list[tuple[Provider, Change, str]]()
        for change in self._changes():
            provider = discover().provider_of(module_of(change.new))
            may_stay = change.patch and may_patch_torch(provider)
            if _is_installed(provider) and not may_stay:
                undone.append((provider, change, change.set_back()))
        for provider, change, outcome in undone:
            words = f"{provider} changed {change.what} {when}: {outcome}"
            tell(Finding(words, provider, _place_of(change.new)))


def _place_of(value: object) -> str:
    try:
        return location_of(value)
    # The attributes of a plugin's object may raise anything.
    except Exception:
        return location_of(type(value))


def tell(finding: Finding) -> None:
    """Log a finding once, and keep it with the records of the plugins of its distribution."""
    findings = PLATFORM_FINDINGS.get()
    records = [each for each in host_state().plugins.values() if each.provider == finding.provider]
    if finding in findings or any(finding in record.findings for record in records):
        return
    logger.warning("%s", printable(str(finding)))
    for record in records:
        record.findings += (finding,)
    if not records:
        findings.append(finding)


watching.KEEPERS.append(definitions_kept)
