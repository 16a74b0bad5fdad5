"""Rows of a plugin's table that name a target which nobody registers."""

from __future__ import annotations

import logging

import pytest
from opgraft import OpgraftConfig, load_plugins, set_config
from opgraft.errors import PluginError
from opgraft.ops import RMSNorm
from opgraft.registry.state import host_state

PLUGIN = """
import opgraft
from opgraft.ops import RMSNorm

platforms = "any"

class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return x * 0

@opgraft.hookimpl
def opgraft_register_ops(platform):
    for name in ("RMSNormClamp", "RMSNorm"):
        opgraft.CustomOp.register_oot(_decorated_op_cls=AcmeRMSNorm, name=name)
"""


def test_a_target_that_nobody_registers_costs_its_own_row_only(site, caplog) -> None:
    """One dead row of a plugin's table is left out and reported; the other rows work."""
    site.plugin("acme", PLUGIN)
    with caplog.at_level(logging.WARNING, logger="opgraft"):
        assert RMSNorm(4).op_class.__name__ == "AcmeRMSNorm"
    assert host_state().plugins["acme"].status.value == "activated"
    assert [replacement.asked_for for replacement in host_state().active] == ["RMSNorm"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "replaces 'RMSNormClamp', which no registered op answers to: did you mean" in message
    assert message.endswith("It is left out; the rest of plugin 'acme' stays.")


def test_a_target_that_nobody_registers_raises_in_strict_mode(site) -> None:
    """Strict mode forgives no dead row."""
    site.plugin("acme", PLUGIN)
    with set_config(OpgraftConfig(strict=True)), pytest.raises(PluginError, match="RMSNormClamp"):
        load_plugins()
    assert host_state().active == []
