"""``opgraft.plugins.bridges``, from which bridges to other plugin hosts are made."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opgraft import OpgraftConfig, set_config
from opgraft.errors import PlatformError
from opgraft.plugins import bridges


def test_a_built_in_platform_is_there_whichever_was_chosen() -> None:
    """The CPU tells its name and memory. An unknown name is an error that lists the known ones."""
    platform = bridges.built_in_platform("cpu")
    assert (platform.name, platform.device_type) == ("cpu", "cpu")
    assert platform.memory().total > 0
    with pytest.raises(PlatformError, match=r"no platform 'gpu': choose one of .*cpu"):
        bridges.built_in_platform("gpu")


def test_a_plugin_is_no_built_in_platform(site: object) -> None:
    """A platform of a plugin is not constructed for whoever asks."""
    site.platform("brix", probe="return Evidence(True, 'found')")  # type: ignore[attr-defined]
    with pytest.raises(PlatformError, match="no platform 'brix'"):
        bridges.built_in_platform("brix")


def test_the_settings_in_force() -> None:
    """A scope counts while it lasts, and every setting has a value."""
    assert bridges.current_config() == bridges.current_config().resolved()
    block_size = bridges.current_config().cache.block_size
    changed = OpgraftConfig()
    changed = OpgraftConfig(cache=type(changed.cache)(block_size=128))
    with set_config(changed):
        assert bridges.current_config().cache.block_size == 128
    assert bridges.current_config().cache.block_size == block_size


@pytest.mark.parametrize(("variable", "level"), [(None, "INFO"), ("debug", "DEBUG")])
def test_the_level_of_the_log(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, level: str
) -> None:
    """The level is the variable's in capitals, or that of information."""
    if variable:
        monkeypatch.setenv("OPGRAFT_LOG", variable)
    assert bridges.log_level() == level


def test_a_probe_may_import_it() -> None:
    """Importing opgraft.plugins.bridges does not import torch."""
    code = "import sys, opgraft.plugins.bridges; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
