"""The built-in platforms before the kit, by the class that plugins use: their contract, and kernels of their own."""

from __future__ import annotations

import pytest
from opgraft.testing import PluginConformance


@pytest.mark.usefixtures("warm_workers")
class TestCpu(PluginConformance):
    plugin = "cpu"


@pytest.mark.gpu
class TestCuda(PluginConformance):
    plugin = "cuda"
