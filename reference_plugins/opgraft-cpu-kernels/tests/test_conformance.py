"""Run opgraft's checks on the plugin, about a thousand. ``--opgraft-brief`` runs fewer of them."""

from opgraft.testing import PluginConformance


class TestCpuKernels(PluginConformance):
    plugin = "cpu_kernels"
