"""Compiles the kernels against the torch that is installed; without a compiler or torch, installs without them.

Beside the package's modules the build puts ``_build.json``: the version of torch that the library is for, or why there
is no library. Only headers and shared libraries of torch are needed, so it is found and not imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/opgraft_cpu_kernels/csrc")
# The first error says what is wrong. Those that follow from it would take minutes and hide it.
COMPILE = ["-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-Wfatal-errors"]
# Kernels need all that a compiler can do. What is around them gains nothing by it, and those for a CPU without vectors
# are there to be right.
KERNELS, OTHERS = "-O3", "-O2"
# Compiled for OpenMP and not linked with it: its functions are to be those that torch has loaded, so that there is one
# pool of threads.
OPENMP = ["-fopenmp"]
# The headers of torch take longer to read than a file that uses them to compile, so that some of these share a reading:
# few enough that a change compiles little of what is left as it was, and that two processors have as much to do.
TORCH_AT_ONCE = 8
TIME_LIMIT = 1800
# How compilers and linkers begin to say what is wrong. Lines before it name the files on the way there.
FAULT = re.compile(r"error:|undefined reference|undefined symbols|cannot find", re.IGNORECASE)


class UnavailableError(Exception):
    """The library cannot be built here; the message says why."""


def compiler(standard: list[str]) -> list[str]:
    """Return the command of the C++ compiler, after a trial on an empty program.

    Args:
        standard: the option for the C++ standard that the trial asks for.

    Raises:
        UnavailableError: the compiler is missing, fails, or does not know the standard.
    """
    command = words("CXX") or ["g++"]
    if not shutil.which(command[0]):
        raise UnavailableError(
            f"the C++ compiler {command[0]} was not found; install g++, or name one by CXX"
        )
    wanted = " ".join(standard)
    try:
        run([*command, *standard, "-x", "c++", "-fsyntax-only", "-"], b"#include <new>\n")
    except UnavailableError as error:
        raise UnavailableError(
            f"the C++ compiler does not compile an empty program with {wanted}, as torch's headers "
            f"need: {error}; install a newer g++, or name one by CXX"
        ) from error
    return command


def words(variable: str) -> list[str]:
    """Divide an environment variable into words as a shell divides it.

    Raises:
        UnavailableError: a quotation in it does not end.
    """
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise UnavailableError(f"{variable} cannot be read: {error}") from error


def torch_folder() -> Path:
    """Find the installed torch. Where pip builds in isolation it is off the path, but in the environment all the same.

    Raises:
        UnavailableError: there is none.
    """
    spec = importlib.util.find_spec("torch")
    found = list(spec.submodule_search_locations or []) if spec else []
    found += [str(Path(sysconfig.get_path(name)) / "torch") for name in ("platlib", "purelib")]
    for folder in map(Path, found):
        if (folder / "include" / "ATen" / "Parallel.h").is_file():
            return folder
    raise UnavailableError(
        "torch with its headers was not found; install torch, then the plugin again, with --no-build-isolation where "
        "the installer builds in an environment apart"
    )


def version_of(torch: Path) -> str:
    """Return the version of the torch in that folder.

    Raises:
        UnavailableError: torch does not say it.
    """
    match = re.search(
        r"__version__ = '([^']+)'", (torch / "version.py").read_text(encoding="utf-8")
    )
    if not match:
        raise UnavailableError(f"{torch / 'version.py'} names no version")
    return match.group(1)


def standard_of(torch: Path) -> list[str]:
    """Return the option for the C++ standard that the headers of this torch need.

    Torch compiles extensions by ``torch/utils/cpp_extension.py``, whose options name the standard again and again; an
    example in its documentation may name another. The check in the headers themselves lags behind: those of torch 2.14
    ask for C++17 and use names of C++20.
    """
    builder = torch / "utils" / "cpp_extension.py"
    named = re.findall(r"-std=c\+\+(\d+)", builder.read_text(encoding="utf-8"))
    if not named:
        return []  # whatever the compiler takes for granted
    times = Counter(named)
    most = max(times, key=lambda number: (times[number], int(number)))
    return [f"-std=c++{most}"]


def compile_library(target: Path, objects: Path) -> str:
    """Compile and link; return the version of torch.

    Raises:
        UnavailableError: something is missing or fails.
    """
    if os.name != "posix":
        raise UnavailableError("the kernels are built on Linux and macOS only")
    torch = torch_folder()
    standard = standard_of(torch)
    command = compiler(standard)
    includes = [
        argument
        for name in ("include", "include/torch/csrc/api/include")
        for argument in ("-isystem", str(torch / name))
    ]
    more = words("CXXFLAGS")
    objects.mkdir(parents=True, exist_ok=True)

    def compile_together(sources: list[Path]) -> str:
        made = str(objects / sources[0].with_suffix(".o").name)
        name = sources[0].stem
        level = KERNELS if name.startswith("path_") and name != "path_scalar" else OTHERS
        text = "".join(f'#include "{source}"\n' for source in sources)
        options = [*standard, *COMPILE, level, *OPENMP, *includes, *more]
        run([*command, *options, "-c", "-x", "c++", "-", "-o", made], text.encode())
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_together, translation_units()))
    target.parent.mkdir(parents=True, exist_ok=True)
    run(
        [
            *command,
            "-shared",
            *made,
            f"-L{torch / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
            "-s",
            "-o",
            str(target),
        ]
    )
    return version_of(torch)


def translation_units() -> list[list[Path]]:
    """List the sources that are compiled together, those that take longest first."""
    paths = sorted(SOURCES.glob("path_*.cpp"), reverse=True)
    others = sorted(set(SOURCES.glob("*.cpp")) - set(paths))
    return [[path] for path in paths] + [
        others[i : i + TORCH_AT_ONCE] for i in range(0, len(others), TORCH_AT_ONCE)
    ]


def run(command: list[str], text: bytes = b"") -> None:
    """Run a compiler.

    Raises:
        UnavailableError: the compiler fails; the message has its first error.
    """
    english = {**os.environ, "LC_ALL": "C"}  # the words by which an error is found
    try:
        result = subprocess.run(  # noqa: S603
            command, input=text, capture_output=True, check=False, timeout=TIME_LIMIT, env=english
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise UnavailableError(f"{command[0]} failed: {error}") from error
    if result.returncode:
        said = first_error(result.stderr) or f"exit status {result.returncode}"
        raise UnavailableError(f"{command[0]} failed: {said}")


def first_error(output: bytes) -> str:
    """Return the line of a compiler's output that has the first error, or all lines if none has one."""
    lines = output.decode(errors="replace").strip().splitlines()
    return next((line.strip() for line in lines if FAULT.search(line)), "\n".join(lines))


class BuildLibrary(build_ext):
    """Builds the one library, whose name says nothing of Python: it knows torch only."""

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.build_lib) / self.get_ext_filename(extension.name)
        record: dict[str, Any]
        try:
            record = {"torch": compile_library(target, Path(self.build_temp)), "missing": None}
        except UnavailableError as reason:
            record = {"torch": None, "missing": str(reason)}
            self.announce(f"opgraft-cpu-kernels is built without its kernels: {reason}", level=3)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_name("_build.json").write_text(json.dumps(record) + "\n", encoding="utf-8")

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.made()]

    def copy_extensions_to_source(self) -> None:
        """Copy for an editable install."""
        for path in self.made():
            self.copy_file(str(path), f"src/opgraft_cpu_kernels/{path.name}")

    def made(self) -> list[Path]:
        target = Path(self.build_lib) / self.get_ext_filename(self.extensions[0].name)
        return [path for path in (target, target.with_name("_build.json")) if path.exists()]


class WheelForEachPython(bdist_wheel):
    """The library does not know Python, so that one wheel serves all versions of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("opgraft_cpu_kernels._kernels", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelForEachPython},
)
