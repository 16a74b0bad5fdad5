"""Run opgraft's checks on the plugin, with Intel's extension on the CPU."""

from opgraft.testing import PluginConformance


class TestIpex(PluginConformance):
    plugin = "ipex"
