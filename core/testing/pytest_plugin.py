"""The part of the conformance kit that pytest loads at the start, by the entry point ``pytest11``.

Nothing of opgraft but the package is imported at the start, for projects without tests of the kit.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from typing import Any

import pytest

BRIEF = "--opgraft-brief"
"""The option for the short form of the kit."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the kit."""
    help = (
        "opgraft.testing.PluginConformance asks the checks of 'opgraft plugins check' only, "
        "on small inputs"
    )
    parser.getgroup("opgraft").addoption(BRIEF, action="store_true", default=False, help=help)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a section to the report of a failed test: op, provider, and the setting to go without."""
    report = yield
    if report.failed and call.excinfo is not None:
        # A failed test of another project may have nothing to do with opgraft.
        raised = importlib.import_module("opgraft.binding.raised")
        told = raised.provenance_of(call.excinfo.value)
        if told:
            report.sections.append(("opgraft", str(told)))
    return report


@pytest.fixture
def opgraft_host() -> Iterator[None]:
    """Give the test a host without activations, and restore the registries afterwards."""
    isolation = importlib.import_module("opgraft.testing.isolation")
    with isolation.isolated_host():
        yield


@pytest.fixture(scope="class")
def opgraft_conformance(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Load the plugin of the test class alone; afterwards the host is as before."""
    conformance = importlib.import_module("opgraft.testing.conformance")
    isolation = importlib.import_module("opgraft.testing.isolation")
    plugin = request.cls.plugin
    brief = request.config.getoption(BRIEF)
    with isolation.isolated_host(), conformance.alone(plugin):
        yield conformance.Conformance(plugin, brief=brief)
