"""How the tests build and install the plugin opgraft-cpu-kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "reference_plugins" / "opgraft-cpu-kernels"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opgraft" / "cpu-kernels"


def source_files() -> list[Path]:
    """What the distribution is built from, without what an earlier build or run left there."""
    left = ("build", "__pycache__", "opgraft_cpu_kernels.egg-info", "_kernels.so", "_build.json")
    return sorted(path for path in PLUGIN.rglob("*") if path.is_file() and not {*path.parts, path.name} & {*left})


def copy_of_sources(folder: Path) -> Path:
    for path in source_files():
        target = folder / path.relative_to(PLUGIN)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    return folder


def install(source: Path, target: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build and install by pip as a user does who has setuptools and torch, without the network."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
