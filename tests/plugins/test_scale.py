"""A site of a thousand distributions: scanned once in a process, and remembered in little memory.

``make bench`` has what it takes in time.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opgraft
import pytest
from opgraft.cli import offers
from opgraft.ops import RMSNorm
from opgraft.plugins.discovery import PLUGIN_GROUP, discover
from opgraft.registry.state import host_state

DISTRIBUTIONS, PLUGINS, EACH = 1000, 10, 50
"""Few plugins with many replacements each: every load of a plugin looks at the whole process."""

PLUGIN = """
from opgraft.registry.state import host_state
platforms = "any"
ops = list(host_state().registry.ops.values())
for number in range({each}):
    target = ops[({plugin} * {each} + number) % len(ops)].cls
    forward_oot = lambda self, *args, **kwargs: self.forward_native(*args, **kwargs)
    members = {{"forward_oot": forward_oot, "__module__": __name__}}
    target.register_oot(priority={plugin} + 1)(type(f"Scale{plugin}x{{number}}", (target,), members))
"""


class Counting:
    """A finder of no distributions, which counts how often it is asked for all of them."""

    def __init__(self) -> None:
        self.asked = 0

    def find_spec(self, *arguments: Any) -> None:
        return None

    def find_distributions(self, context: Any) -> Iterator[Any]:
        self.asked += context.name is None
        return iter(())


@pytest.fixture
def large(site) -> Path:
    """The site with its distributions, of which some have plugins."""
    for number in range(DISTRIBUTIONS):
        name, plugin = f"scale_{number}", number * PLUGINS // DISTRIBUTIONS
        if number * PLUGINS % DISTRIBUTIONS == 0:
            site.plugin(name.replace("_", "-"), PLUGIN.format(plugin=plugin, each=EACH))
        else:
            points = {"console_scripts": [f"{name} = {name}:main"]}
            site.install(name, {f"{name}.py": "def main(): ...\n"}, points)
    folder: Path = site.folder
    return folder


def test_a_large_site_is_scanned_once_and_kept_small(large: Path, monkeypatch) -> None:
    """Whatever asks for plugins in a process shares one scan; records of all stay below 10 MB."""
    finder = Counting()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    tracemalloc.start()
    try:
        opgraft.load_plugins()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(discover().of_group(PLUGIN_GROUP)) == PLUGINS
    assert len(host_state().active) == PLUGINS * EACH
    assert (list(offers.misspelt_groups()), list(offers.plugins_of_vllm())) == ([], [])
    assert RMSNorm(8).binding.provider.name.startswith("scale-")
    assert finder.asked == 1
    assert held < 10e6


def test_a_group_that_is_misspelt_is_found_by_the_same_scan(site) -> None:
    """Groups of distributions that offer nothing to opgraft are remembered; those of other hosts are their own."""
    site.install(
        "acme",
        {"acme.py": ""},
        {"opgraft.plugin": ["acme = acme"], "console_scripts": ["acme = acme:main"]},
    )
    site.install("theirs", {"theirs.py": ""}, {"vllm.general_plugins": ["theirs = theirs"]})
    site.install(
        "docs",
        {"docs.py": ""},
        {"mkdocs.plugins": ["docs = docs"], "grafana.platforms": ["docs = docs"]},
    )
    assert [problem.provider.name for problem in offers.misspelt_groups()] == ["acme"]
    assert [problem.provider.name for problem in offers.plugins_of_vllm()] == ["theirs"]
