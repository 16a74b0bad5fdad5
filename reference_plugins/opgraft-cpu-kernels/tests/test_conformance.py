"""The plugin before the checks of opgraft, a thousand; ``--opgraft-brief`` asks those that tell most."""

from opgraft.testing import PluginConformance


class TestCpuKernels(PluginConformance):
    plugin = "cpu_kernels"
