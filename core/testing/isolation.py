"""A host for a test alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opgraft.plugins.discovery import discover
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state, reset


@contextmanager
def isolated_host(*, forget_plugins: bool = False) -> Iterator[None]:
    """Start from a host without activations, and restore the registries afterwards.

    Declarations of plugins stay, as imported modules would not declare anything again.

    Args:
        forget_plugins: remove the declarations of plugins, too. Tests that install plugins and
            remove the modules need this.
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
        # The registries stay the same objects: other modules hold them.
        for records, before in known:
            kept = {name: record for name, record in records.items() if stays(record.provider)}
            records.clear()
            records.update({**before, **kept})
        added = [each for each in registry.replacements if each not in replacements]
        replacements += [each for each in added if stays(each.provider)]
        registry.replacements[:] = replacements
        for owner in list(registry.owned):
            if not stays(owner.provider):
                del registry.owned[owner]
        reset()
