"""The plugin before the checks of opgraft; device.json stands in for the device."""

import os
from pathlib import Path

from opgraft.testing import PluginConformance

os.environ.setdefault("TOY_NPU_DEVICE", str(Path(__file__).parents[1] / "device.json"))


class TestToyNpu(PluginConformance):
    plugin = "toy_npu"
