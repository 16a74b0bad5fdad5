"""The part of the conformance kit that pytest loads at its start, by the entry point ``pytest11``.

It imports nothing of opgraft but the package, so that it costs nothing where no test uses it.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from typing import Any

import pytest

BRIEF = "--opgraft-brief"
"""The option that asks for the short form of the kit."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the kit."""
    help = "opgraft.testing.PluginConformance asks the checks of 'opgraft plugins check' only, on small inputs"
    parser.getgroup("opgraft").addoption(BRIEF, action="store_true", default=False, help=help)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a test that failed which op raised, whose it is, and what goes without it."""
    report = yield
    if report.failed and call.excinfo is not None:
        told = importlib.import_module("opgraft.binding.raised").provenance_of(call.excinfo.value)
        report.sections += [("opgraft", str(told))] if told else []
    return report


@pytest.fixture
def opgraft_host() -> Iterator[None]:
    """Give the test a host that is reset, whose registries are afterwards as they were."""
    with importlib.import_module("opgraft.testing.isolation").isolated_host():
        yield


@pytest.fixture(scope="class")
def opgraft_conformance(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Load the plugin that the class names, alone, for its tests; afterwards the host is as before."""
    conformance = importlib.import_module("opgraft.testing.conformance")
    with (
        importlib.import_module("opgraft.testing.isolation").isolated_host(),
        conformance.alone(request.cls.plugin),
    ):
        yield conformance.Conformance(request.cls.plugin, brief=request.config.getoption(BRIEF))
