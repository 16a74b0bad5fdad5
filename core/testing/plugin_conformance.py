"""``PluginConformance``, the class by which a plugin's own tests ask every check of the kit."""

from __future__ import annotations

from typing import ClassVar

import pytest
from opgraft.testing.conformance import FAILED, SKIPPED, Case, Conformance, alone
from opgraft.testing.isolation import isolated_host
from opgraft.testing.pytest_plugin import BRIEF


class PluginConformance:
    """Asks every question about a plugin, each as a test of its own, such as ``test_conforms[rms_norm-strides]``.

    Derive from it, and name the plugin, in a file of its own: the plugin is loaded when the tests are collected. It is
    loaded alone, with its device where it needs one, once for the class.

    Attributes:
        plugin: the name of its entry point or of its distribution.
    """

    plugin: ClassVar[str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each question."""
        if "case" in metafunc.fixturenames:
            with isolated_host(), alone(self.plugin):
                cases = Conformance(self.plugin, brief=metafunc.config.getoption(BRIEF)).cases
            metafunc.parametrize("case", cases, ids=str)

    def test_conforms(self, opgraft_conformance: Conformance, case: Case) -> None:
        """The plugin passes the check, or the check does not apply."""
        outcome = opgraft_conformance.judge(case)
        if outcome.status == SKIPPED:
            pytest.skip(outcome.reason)
        if outcome.status == FAILED:
            pytest.fail(outcome.reason, pytrace=False)
