"""Setting back changes of the process by the code of plugins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opgraft.base.log import logger
from opgraft.base.text import printable
from opgraft.plugins.changes import Change
from opgraft.plugins.definitions import DEFINITIONS, module_of
from opgraft.plugins.discovery import discover
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
            with DEFINITIONS.imports_read():
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

    A patch of torch stays if the distribution of the plugin offers a platform.

    Yields:
        A list that has what was put back, in words, once the step has ended.
    """
    told = list[str]()
    brings_platform = bool(discover().platforms_of(provider))
    if not (brings_platform or discover().has_plugin(provider)):
        yield told
        return
    before = DEFINITIONS.read()
    try:
        with DEFINITIONS.imports_read():
            yield told
    finally:
        for change in DEFINITIONS.changes(before, DEFINITIONS.read()):
            if not (change.patch and brings_platform):
                told.append(f"{what} changed {change.what}: {change.set_back()}")
        for words in told:
            tell(Finding(words, provider, location_of(code)))


class LatePatches:
    """Puts back functions of opgraft and torch that plugins replace after they were loaded.

    The code of no plugin is watched meanwhile, such as a kernel or a thread. So only functions and
    classes that a plugin defines count. A patch of torch stays if the distribution of the plugin
    offers a platform.
    """

    def __init__(self) -> None:
        # A process without plugins does not wait for any look.
        self._before = DEFINITIONS.read() if host_state().plugins else None
        self._calls = 0
        self._next_look = 1

    def look_after_call(self) -> None:
        """Look after the calls 1, 8, 64 and so on, since a look takes milliseconds."""
        self._calls += 1
        if self._calls == self._next_look:
            self._next_look *= 8
            self.look("while a model ran")

    def look(self, when: str) -> None:
        """Put back the patches since the first look, and tell of each.

        Args:
            when: the occasion, in words.
        """
        if self._before is None:
            return
        discovery = discover()
        for change in DEFINITIONS.changes(self._before, DEFINITIONS.read()):
            provider = discovery.provider_of(module_of(change.new))
            if not discovery.has_plugin(provider):
                continue
            if change.patch and discovery.platforms_of(provider):
                continue
            words = f"{provider} changed {change.what} {when}: {change.set_back()}"
            tell(Finding(words, provider, location_of(change.new)))


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
