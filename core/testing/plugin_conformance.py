"""``PluginConformance``: every check of the kit as a test of a plugin's own."""

from __future__ import annotations

from typing import ClassVar

import pytest
from opgraft.testing.conformance import FAILED, SKIPPED, Case, Conformance, alone
from opgraft.testing.isolation import isolated_host
from opgraft.testing.pytest_plugin import BRIEF


class PluginConformance:
    """Every question about a plugin as a test, such as ``test_conforms[rms_norm-strides]``.

    Derive a class in a file of its own, and name the plugin. The plugin is loaded alone, once for
    the class, when pytest collects the tests. A plugin for a device needs the device.

    Attributes:
        plugin: the name of the entry point or of the distribution.
    """

    plugin: ClassVar[str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test for each question."""
        if "case" in metafunc.fixturenames:
            # Loading for the list of questions must leave nothing behind.
            with isolated_host(), alone(self.plugin):
                brief = metafunc.config.getoption(BRIEF)
                cases = Conformance(self.plugin, brief=brief).cases
            metafunc.parametrize("case", cases, ids=str)

    def test_conforms(self, opgraft_conformance: Conformance, case: Case) -> None:
        """The plugin passes the check, or the check does not apply."""
        outcome = opgraft_conformance.judge(case)
        if outcome.status == SKIPPED:
            pytest.skip(outcome.reason)
        if outcome.status == FAILED:
            # The trace of the kit would hide the reason.
            pytest.fail(outcome.reason, pytrace=False)
