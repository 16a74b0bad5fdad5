"""Run opgraft's checks on the plugin. The file ``device.json`` stands in for the device."""

import os
from pathlib import Path

from opgraft.testing import PluginConformance

DEVICE = Path(__file__).parents[1] / "device.json"
os.environ.setdefault("TOY_NPU_DEVICE", str(DEVICE))


class TestToyNpu(PluginConformance):
    plugin = "toy_npu"
