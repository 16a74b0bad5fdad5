"""Commands where streams, folders, limits and files of settings are not what they should be."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import opgraft
import pytest
from support.faults.environment_rows import COMMANDS, LIMITS, ROWS, STREAMS
from support.faults.planting import PLUGIN

pytestmark = pytest.mark.faults
TIME_LIMIT = 60.0  # seconds, where a busy machine takes five


@pytest.fixture(scope="module")
def zipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of opgraft in an archive."""
    package = Path(opgraft.__file__).parent
    archive = tmp_path_factory.mktemp("zipped") / "opgraft.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for module in package.rglob("*.py"):
            file.write(module, module.relative_to(package.parent))
    return archive


@pytest.mark.parametrize("name", ROWS)
def test_environment(site, tmp_path, zipped: Path, name: str) -> None:
    """A command answers, or ends with one message and its exit code; it never hangs, and never shows a traceback."""
    site.plugin("acme", PLUGIN)
    line, (code, words) = ROWS[name]
    for number, command in enumerate(COMMANDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = subprocess.run(
            ["/bin/bash", "-c", line.format(f"{sys.executable} -m opgraft {command}")],
            env={**os.environ, "PYTHONPATH": str(site.folder), "ZIPPED": str(zipped)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        said = f"{ended.stdout}\n{ended.stderr}"
        assert ended.returncode == code, f"{command}: {said}"
        assert words in said, f"{command}: {said}"
        assert "Traceback" not in said, f"{command}: {said}"
        if not words and name not in STREAMS:
            assert "acme" in ended.stdout or "platform" in ended.stdout, f"{command}: {said}"
        if words:
            assert len(ended.stderr.splitlines()) == 1, f"{command}: {ended.stderr}"


AS_ANYBODY = "setpriv --reuid=65534 --clear-groups --inh-caps=-all,+dac_override --ambient-caps=-all,+dac_override"
"""How root becomes somebody for whom the limit on processes holds, and who may read what tests have written."""


@pytest.mark.parametrize("name", LIMITS)
def test_limits(site, tmp_path, name: str) -> None:
    """Where no process can be started, or no file be written, a command goes without, or says which it was."""
    line, commands = LIMITS[name]
    if "unshare" in line and subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system lets nobody mount a folder of their own")
    user = AS_ANYBODY if "ulimit -u" in line and os.geteuid() == 0 else ""
    site.platform("acme", probe="return Evidence(False, 'looked at')", plugin=PLUGIN)
    for number, (command, (code, words)) in enumerate(commands.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = subprocess.run(
            [
                *user.split(),
                "/bin/bash",
                "-c",
                line.format(f"{sys.executable} -m opgraft {command}"),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(site.folder),
                "PYTHONDONTWRITEBYTECODE": "1",
                "COLUMNS": "500",
            },
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        said = f"{ended.stdout}\n{ended.stderr}"
        assert (ended.returncode, words in said) == (code, True), f"{command}: {said}"
        assert "Traceback" not in said
