"""Run opgraft's checks on the plugin, with zentorch on the CPU."""

from opgraft.testing import PluginConformance


class TestZentorch(PluginConformance):
    plugin = "zentorch"
