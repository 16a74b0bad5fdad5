"""Run opgraft's checks on the plugin, with JAX for the CPU."""

import os

from opgraft.testing import PluginConformance

os.environ.setdefault("JAX_RUNTIME_DEVICE", "cpu")


class TestJax(PluginConformance):
    plugin = "jax"
