"""How the tests build and install the plugin opgraft-cpu-kernels; as a program, a compiler that repeats nothing."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "reference_plugins" / "opgraft-cpu-kernels"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opgraft" / "cpu-kernels"


def source_files() -> list[Path]:
    """What the distribution is built from, without what an earlier build or run left there."""
    left = ("build", "__pycache__", "opgraft_cpu_kernels.egg-info", "_kernels.so", "_build.json")
    return sorted(
        path
        for path in PLUGIN.rglob("*")
        if path.is_file() and not {*path.parts, path.name} & {*left}
    )


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
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def built(folder: Path) -> Path:
    """The folder with the installed plugin. A build is kept for the next time and shared by processes.

    Args:
        folder: an empty one for a build.
    """
    target = kept()
    # Another build, of other sources, may have the lock for minutes.
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            others = {*CACHE.glob("*/")} - {CACHE / "objects"}
            for old in sorted(others, key=lambda each: each.stat().st_mtime)[:-6]:
                shutil.rmtree(old)
            result = install(copy_of_sources(folder / "source"), folder / "site", CXX=compiler())
            if result.returncode:
                raise RuntimeError(result.stdout + result.stderr)
            shutil.copytree(folder / "site", partial := CACHE / f"partial-{os.getpid()}")
            partial.rename(target)
    return target


NEEDS = {
    "path_amx": {"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"},
    "path_avx512_bf16": {"avx512f", "avx512_bf16", "avx512_vnni"},
    "path_avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
"""By source: flags of a processor without which nothing in it can run."""


def never_run() -> list[str]:
    """The sources that this processor cannot run. They are compiled, as their errors count, and not optimized."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    return [] if flags is None else [name for name, needs in NEEDS.items() if not needs <= flags]


def versions() -> str:
    """What objects depend on beside their sources."""
    gcc = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    return f"{gcc} {metadata.version('torch')} {sys.version_info[:2]}"


def kept() -> Path:
    """The folder in which the plugin is kept, built of these sources by this compiler for this torch and Python."""
    digest = hashlib.sha256(f"{versions()} {never_run()}".encode())
    for path in source_files():
        digest.update(str(path.relative_to(PLUGIN)).encode() + path.read_bytes())
    return CACHE / digest.hexdigest()[:16]


def compiler() -> str:
    """What ``CXX`` says so that everybody who installs the plugin shares objects, and each is compiled once."""
    return shlex.join([sys.executable, __file__, str(CACHE / "objects")])


def included(text: bytes, folder: Path) -> Iterator[bytes]:
    """What a source reads of files beside it, themselves and theirs; what torch and the compiler bring is not."""
    for name in re.findall(rb'^#include "(.+)"', text, re.MULTILINE):
        path = folder / name.decode()
        yield (found := path.read_bytes())
        yield from included(found, path.parent)


def compile_once(objects: Path, arguments: list[str]) -> int:
    """Call g++, unless it was called with the same arguments to compile the same sources; its status."""
    if "-c" not in arguments:
        return subprocess.run(["g++", *arguments], check=False).returncode
    text, made = sys.stdin.buffer.read(), Path(arguments[arguments.index("-o") + 1])
    if made.stem in never_run():
        arguments = ["-O0" if argument == "-O3" else argument for argument in arguments]
    key = b"\0".join([versions().encode(), repr(arguments).encode(), text, *included(text, Path())])
    copy = objects / f"{made.stem}-{hashlib.sha256(key).hexdigest()[:16]}.o"
    objects.mkdir(parents=True, exist_ok=True)
    with copy.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who wants the same object meanwhile waits for it
        if not copy.exists():
            result = subprocess.run(["g++", *arguments], input=text, check=False)
            if result.returncode:
                return result.returncode
            forget_old(objects)
            shutil.copyfile(made, partial := copy.with_suffix(".partial"))
            partial.rename(copy)
        os.utime(copy)
        shutil.copyfile(copy, made)
    return 0


def forget_old(objects: Path, keep: int = 100) -> None:
    for old in sorted(objects.glob("*.o"), key=lambda path: path.stat().st_mtime)[:-keep]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(compile_once(Path(sys.argv[1]), sys.argv[2:]))
