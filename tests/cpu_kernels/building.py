"""How the tests build and install the plugin opgraft-cpu-kernels; as a program, a compiler that repeats nothing."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
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


def kept() -> Path:
    """The folder in which the plugin is kept, built of these sources by this compiler for this torch and Python."""
    versions = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{versions} {metadata.version('torch')} {sys.version_info[:2]}".encode())
    for path in source_files():
        digest.update(str(path.relative_to(PLUGIN)).encode() + path.read_bytes())
    return CACHE / digest.hexdigest()[:16]


def compiler() -> str:
    """What ``CXX`` says so that everybody who installs the plugin shares objects, and each is compiled once."""
    return shlex.join([sys.executable, __file__, f"{kept()}-objects"])


def compile_once(objects: Path, arguments: list[str]) -> int:
    """Call g++, unless it was called with the same arguments to compile the same sources; its status."""
    if "-c" not in arguments:
        return subprocess.run(["g++", *arguments], check=False).returncode
    made = Path(arguments[arguments.index("-o") + 1])
    copy = objects / f"{made.stem}-{hashlib.sha256(repr(arguments).encode()).hexdigest()[:16]}.o"
    objects.mkdir(parents=True, exist_ok=True)
    with copy.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who wants the same object meanwhile waits for it
        if not copy.exists():
            result = subprocess.run(["g++", *arguments], check=False)
            if result.returncode:
                return result.returncode
            shutil.copyfile(made, partial := copy.with_suffix(".partial"))
            partial.rename(copy)
        shutil.copyfile(copy, made)
    return 0


if __name__ == "__main__":
    sys.exit(compile_once(Path(sys.argv[1]), sys.argv[2:]))
