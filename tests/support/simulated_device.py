"""Tests of engine, serving and server that 'make test-simulated' leaves out, each with the reason."""

from __future__ import annotations

import pytest

UNFIT: dict[str, str] = {}
"""By a file or a test: why the simulated device is nothing for it."""


def skip_unfit(items: list[pytest.Item]) -> None:
    """Skip the tests of ``UNFIT``."""
    for item in items:
        path = str(item.path).rpartition("/tests/")[2]
        test = f"{path}::{item.nodeid.partition('::')[2].partition('[')[0]}"
        reason = UNFIT.get(path) or UNFIT.get(test)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
