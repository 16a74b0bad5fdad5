"""Running the tests that a reference plugin has of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "reference_plugins"


def own_tests(
    python: str, plugin: str, site: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run a plugin's own tests, as its author does who has it installed."""
    warm = ("-W", "ignore:Module already imported")  # so that pytest cannot rewrite its assertions
    folder = str(PLUGINS / plugin / "tests")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *warm, folder, *options]
    environ = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        command, env=environ, cwd=PLUGINS.parent, capture_output=True, text=True, check=False
    )
