"""A host of their own for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opgraft.plugins.discovery import discover
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state, reset


@contextmanager
def isolated_host(*, forget_plugins: bool = False) -> Iterator[None]:
    """Start from a host that is reset; afterwards its registries are as they were, and nothing is active.

    Declarations of plugins stay, as their modules stay imported and would not make them again. ``forget_plugins``: they
    go too, for tests that install plugins and remove them with their modules.
    """
    reset()
    registry = host_state().registry
    known = [(records, dict(records)) for records in (registry.ops, registry.classes)]
    replacements = list(registry.replacements)

    def stays(provider: Provider) -> bool:
        return not forget_plugins and discover().has_plugin(provider)

    try:
        yield
    finally:
        for records, before in known:
            kept = {name: record for name, record in records.items() if stays(record.provider)}
            records.clear()
            records.update({**before, **kept})
        kept_too = [
            each
            for each in registry.replacements
            if each not in replacements and stays(each.provider)
        ]
        registry.replacements[:] = [*replacements, *kept_too]
        for owner in [owner for owner in registry.owned if not stays(owner.provider)]:
            del registry.owned[owner]
        reset()
