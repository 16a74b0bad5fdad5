"""The collector is held back while objects are made that stay."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from opgraft.base.collector import without_collections


@pytest.fixture(autouse=True)
def _same_collector() -> Iterator[None]:
    before = gc.isenabled()
    yield
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_wait_for_what_is_made(enabled: bool) -> None:
    """Also where it fails; a collector that was switched off before stays so."""
    (gc.enable if enabled else gc.disable)()
    with suppress(KeyError), without_collections():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is enabled


def test_what_is_made_counts_as_old() -> None:
    """The next collection of young objects does not look at it."""
    program = """
import gc
from opgraft.base.collector import without_collections
def is_old(made):
    return any(each is made for each in gc.get_objects(generation=2))
with without_collections():
    made = [[]]
    within = is_old(made)
print(within, is_old(made), gc.get_freeze_count())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False True 0\n", done.stderr


def test_what_a_program_has_frozen_stays_frozen() -> None:
    program = """
import gc
from opgraft.base.collector import without_collections
gc.freeze()
before = gc.get_freeze_count()
with without_collections():
    made = [[]]
print(gc.get_freeze_count() >= before > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_the_first_import_of_torch_is_not_collected() -> None:
    program = """
import gc
import opgraft
seen = []
gc.callbacks.append(lambda phase, _: seen.append(phase))
opgraft.LLM
print(len(seen), gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "0 True\n", done.stderr
