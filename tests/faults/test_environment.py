"""Commands where streams, folders, limits and files of settings are not what they should be."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import opgraft
import pytest
from faults.environment_rows import COMMANDS, ROWS, STREAMS
from faults.planting import PLUGIN

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
