"""Compile the kernels against the installed torch.

Without a compiler or torch, the plugin is installed without its library. The build writes
``_build.json`` beside the package's modules. The file names the library's version of torch, or the
reason why there is no library. The build finds torch without an import: it needs only the headers
and the shared libraries.
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
# The first error says what is wrong. Further errors would take minutes and hide the first one.
COMPILE = ["-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-Wfatal-errors"]
# -O3 pays for kernels. The code around them gains nothing by it, and the kernels for a CPU without
# vectors need to be right, not fast.
KERNELS, OTHERS = "-O3", "-O2"
# Compiled for OpenMP, but not linked with it: the library uses the OpenMP that torch has loaded, so
# that there is one pool of threads.
OPENMP = ["-fopenmp"]
# Reading the headers of torch takes longer than compiling a file that uses them. So some files are
# compiled together. With few files at once, a change compiles little again, and two processors
# share the work evenly.
TORCH_AT_ONCE = 8
# Seconds for one run of the compiler.
TIME_LIMIT = 1800
# The words of compilers and linkers that begin a message. Lines before it name including files.
FAULT = re.compile(r"error:|undefined reference|undefined symbols|cannot find", re.IGNORECASE)


class UnavailableError(Exception):
    """The library cannot be built here, for the reason in the message."""


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
    trial = [*command, *standard, "-x", "c++", "-fsyntax-only", "-"]
    try:
        run(trial, b"#include <new>\n")
    except UnavailableError as error:
        wanted = " ".join(standard)
        raise UnavailableError(
            f"the C++ compiler does not compile an empty program with {wanted}, as torch's headers "
            f"need: {error}; install a newer g++, or name one by CXX"
        ) from error
    return command


def words(variable: str) -> list[str]:
    """Return the words of an environment variable, divided as a shell divides them.

    Raises:
        UnavailableError: a quotation does not end.
    """
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise UnavailableError(f"{variable} cannot be read: {error}") from error


def torch_folder() -> Path:
    """Return the folder of the installed torch.

    Raises:
        UnavailableError: torch with headers is not installed.
    """
    spec = importlib.util.find_spec("torch")
    found = list(spec.submodule_search_locations or []) if spec else []
    # If pip builds in isolation, torch is not on the path, but in the environment all the same.
    for name in ("platlib", "purelib"):
        found.append(str(Path(sysconfig.get_path(name)) / "torch"))
    for folder in map(Path, found):
        if (folder / "include" / "ATen" / "Parallel.h").is_file():
            return folder
    raise UnavailableError(
        "torch with its headers was not found; install torch, then the plugin again, with "
        "--no-build-isolation where the installer builds in an environment apart"
    )


def version_of(torch: Path) -> str:
    """Return the version of the torch in that folder.

    Raises:
        UnavailableError: the folder names no version.
    """
    file = torch / "version.py"
    match = re.search(r"__version__ = '([^']+)'", file.read_text(encoding="utf-8"))
    if not match:
        raise UnavailableError(f"{file} names no version")
    return match.group(1)


def standard_of(torch: Path) -> list[str]:
    """Return the option for the C++ standard that the headers of this torch need.

    Torch compiles extensions by ``torch/utils/cpp_extension.py``. Its options name the standard
    several times. An example in the documentation may name another one, so the most frequent
    standard wins. The headers check for a standard, too, but the check lags behind: the headers of
    torch 2.14 ask for C++17 and use names of C++20.
    """
    builder = torch / "utils" / "cpp_extension.py"
    named = re.findall(r"-std=c\+\+(\d+)", builder.read_text(encoding="utf-8"))
    if not named:
        return []  # the compiler's own default
    times = Counter(named)
    most = max(times, key=lambda number: (times[number], int(number)))
    return [f"-std=c++{most}"]


def compile_library(target: Path, objects: Path) -> str:
    """Compile and link the library, and return the version of torch.

    Args:
        target: the path of the library.
        objects: the folder for the compiled parts.

    Raises:
        UnavailableError: the compiler or torch is missing, or a command fails.
    """
    if os.name != "posix":
        raise UnavailableError("the kernels are built on Linux and macOS only")
    torch = torch_folder()
    standard = standard_of(torch)
    command = compiler(standard)
    includes = ["-isystem", str(torch / "include")]
    includes += ["-isystem", str(torch / "include/torch/csrc/api/include")]
    # The user's flags come last, so that they win.
    more = words("CXXFLAGS")
    objects.mkdir(parents=True, exist_ok=True)

    def compile_together(sources: list[Path]) -> str:
        made = str(objects / sources[0].with_suffix(".o").name)
        options = [*standard, *COMPILE, optimization(sources[0]), *OPENMP, *includes, *more]
        text = "".join(f'#include "{source}"\n' for source in sources)
        run([*command, *options, "-c", "-x", "c++", "-", "-o", made], text.encode())
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_together, translation_units()))
    target.parent.mkdir(parents=True, exist_ok=True)
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    run([*command, "-shared", *made, *libraries, "-s", "-o", str(target)])
    return version_of(torch)


def optimization(source: Path) -> str:
    """Return the compiler's level of optimisation for a source."""
    is_kernel = source.stem.startswith("path_") and source.stem != "path_scalar"
    return KERNELS if is_kernel else OTHERS


def translation_units() -> list[list[Path]]:
    """Return lists of sources that are compiled together, the slowest lists first."""
    paths = sorted(SOURCES.glob("path_*.cpp"), reverse=True)
    others = sorted(set(SOURCES.glob("*.cpp")) - set(paths))
    units = [[path] for path in paths]
    for first in range(0, len(others), TORCH_AT_ONCE):
        units.append(others[first : first + TORCH_AT_ONCE])
    return units


def run(command: list[str], text: bytes = b"") -> None:
    """Run a compiler, with ``text`` as its input.

    Raises:
        UnavailableError: the compiler fails. The message has the first error.
    """
    # FAULT finds an error by English words.
    english = {**os.environ, "LC_ALL": "C"}
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
    """Return the first line with an error in a compiler's output, or all lines if none has one."""
    lines = output.decode(errors="replace").strip().splitlines()
    for line in lines:
        if FAULT.search(line):
            return line.strip()
    return "\n".join(lines)


class BuildLibrary(build_ext):
    """Builds the one library. Its name has no version of Python, as it depends on torch only."""

    def build_extension(self, extension: Extension) -> None:
        """Build the library. Record the version of torch, or the reason for a missing library."""
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
        """Return the library's path in the package."""
        return f"{fullname.replace('.', '/')}.so"

    def get_outputs(self) -> list[str]:
        """Return the paths that belong into a wheel."""
        return [str(path) for path in self.made()]

    def copy_extensions_to_source(self) -> None:
        """Copy the library beside its modules, for an editable install."""
        for path in self.made():
            self.copy_file(str(path), f"src/opgraft_cpu_kernels/{path.name}")

    def made(self) -> list[Path]:
        """Return the paths of the library and its record, as far as they exist."""
        library = Path(self.build_lib) / self.get_ext_filename(self.extensions[0].name)
        record = library.with_name("_build.json")
        return [path for path in (library, record) if path.exists()]


class WheelForEachPython(bdist_wheel):
    """A wheel for all versions of Python, as the library depends on torch only."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tags: any Python 3, no ABI, and the platform."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    ext_modules=[Extension("opgraft_cpu_kernels._kernels", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelForEachPython},
)
