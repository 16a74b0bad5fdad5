"""Tests of engine, serving and server that 'make test-simulated' leaves out, each with the reason."""

from __future__ import annotations

import pytest

_OF_CPU = "changes what the CPU platform says of its memory"

UNFIT: dict[str, str] = {
    "serving/test_llm.py::test_logprobs_grow_in_place": (
        "steps the engine beside the engine's own thread, and slow steps of the two meet"
    ),
    "serving/test_llm.py::test_the_cache_takes_a_share_of_what_is_free": _OF_CPU,
    "serving/test_llm.py::test_the_memory_is_that_of_the_device": _OF_CPU,
    "serving/test_llm.py::test_memory_that_nobody_knows": _OF_CPU,
}
"""By a file or a test: why the simulated device is nothing for it."""


def skip_unfit(items: list[pytest.Item]) -> None:
    """Skip the tests of ``UNFIT``."""
    for item in items:
        path = str(item.path).rpartition("/tests/")[2]
        test = f"{path}::{item.nodeid.partition('::')[2].partition('[')[0]}"
        reason = UNFIT.get(path) or UNFIT.get(test)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
