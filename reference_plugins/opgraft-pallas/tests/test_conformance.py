"""Run opgraft's checks on the plugin, on XLA's CPU client."""

import os

from opgraft.testing import PluginConformance

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("OPGRAFT_PLATFORM", "tpu")
# Each shape is a program of its own here, and most of the time goes to XLA's optimizations.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


class TestPallas(PluginConformance):
    plugin = "pallas"
