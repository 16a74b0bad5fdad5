"""Reading the documentation as its readers do: files are written, commands run, Python executed, output compared."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import opgraft
import opgraft.ops  # before the host is first reset: what is imported during a test is forgotten after it
import opgraft.serving.llm
import pytest
import tomllib
from opgraft.base.log import logger
from opgraft.plugins import discovery
from support.built_kernels import compiler
from support.makefile import COMMANDS

REPOSITORY = Path(__file__).parents[2]
FOREIGN = {offer.provider.name for offer in discovery.scan().offers if not offer.built_in}

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[^\S\n]*$", re.M | re.S
)
_HEADING = re.compile(r"^#+ (.+)$", re.M)
_OPGRAFT_ITSELF = r"(.* )?['\"]?\.(\[\w+\])?['\"]?"

VOLATILE = {
    r"\d+ x [^,]+,( [a-z0-9_ ]+,)? \d+ GiB": "<this machine's CPU>",
    r"/proc/cpuinfo: \d+ processors": "<its cores>",
    r"model +time +tokens per second +answers +difference": "<columns>",
    r"(plain|grafted) +[\d.]+ s +[\d.]+": r"\1 <times>",
    r"(the same|others) +\d\.\de[+-]\d\d": r"\1 <difference>",
    r"holds [\d,]+ tokens in [\d,]+ blocks": "holds <this machine's tokens>",
    # Linear layers are torch's own where the processor multiplies bfloat16.
    r"kernels \d+ of": "kernels <of this processor> of",
    r"chatcmpl-[0-9a-f]+": "<id>",
    r'"created": \d+': "<time>",
}
"""What differs from machine to machine and from run to run; the pages show it as it was once."""

SERVED = "127.0.0.1:8000"
"""The address of the pages' server, which gets a free port here, as pages are read at the same time."""


IN_ENVIRONMENT = """import os, runpy, site, sys
sys.prefix = sys.exec_prefix = {folder!r}
outer, sys.path[:] = sys.path[1:], sys.path[:1]
site.addsitedir({packages!r})
sys.path += outer
"""
"""The start of a script in a virtual environment, for an interpreter that was started outside of it."""

COMMAND_LINE = """from opgraft.cli import main
main()
"""

INTERPRETER = """sys.executable, *sys.argv = sys.argv
if sys.argv[0] == "-u":
    del sys.argv[0]
    sys.stdout.reconfigure(write_through=True)
if sys.argv[:2] == ["-m", "pytest"]:  # which rewrites what it is the first to import
    os.execv({python!r}, [{python!r}, *sys.argv])
elif sys.argv[0] == "-m":
    del sys.argv[0]
    sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
elif sys.argv[0].startswith("-"):
    os.execv({python!r}, [{python!r}, *sys.argv])
else:
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Block:
    """One fenced block: language, file name in its title, text, line on the page, and the heading that it is below."""

    language: str
    title: str | None
    text: str
    line: int
    section: str


def read_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for fence in _FENCE.finditer(text):
        language, _, rest = fence["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        body = textwrap.dedent(fence["body"])
        line = text.count("\n", 0, fence.start()) + 2
        section = [
            heading[1] for heading in _HEADING.finditer(_FENCE.sub("", text[: fence.start()]))
        ][-1]
        blocks.append(Block(language, title and title[1], body, line, section))
    return blocks


def output_in(block: Block) -> str | None:
    """The text of a block that shows output, ``None`` of any other."""
    return block.text if block.language == "text" else None


def normalized(text: str) -> str:
    """Text with every stretch of white space as one space, because lines wrap at places that depend on file names."""
    text = " ".join(text.split())
    for pattern, stand_in in VOLATILE.items():
        text = re.sub(pattern, stand_in, text)
    return text


def matches(shown: str, got: str) -> bool:
    """Whether output is as the page shows it, where ``...`` stands for anything, nothing included."""
    pattern = (
        re.escape(normalized(shown))
        .replace(r"\ \.\.\.\ ", r"\ (?:.*?\ )?")
        .replace(r"\.\.\.", ".*?")
    )
    return re.fullmatch(pattern, normalized(got)) is not None


@dataclass
class Reader:
    """Somebody who follows a page from top to bottom in a checkout, with one terminal and one Python session."""

    folder: Path
    environment: Path
    variables: dict[str, str]
    session: ModuleType = field(default_factory=lambda: ModuleType("__main__"))
    status: int = 0
    server: subprocess.Popen[str] | None = None
    address: str = SERVED

    def follow(self, page: Path, section: str | None = None) -> None:
        blocks = [block for block in read_blocks(page) if section in (None, block.section)]
        for block, following in pairwise([*blocks, Block("end", None, "", 0, "")]):
            place = f"{page.relative_to(REPOSITORY)}:{block.line}"
            if block.title:
                self._write(block)
            elif block.language == "python":
                self._execute(block.text, page, block.line, output_in(following))
            elif block.language == "sh":
                self._paste(block.text, output_in(following), place)
            elif block.language in ("console", "bash"):
                self._type(block.text, place)
            else:
                check_untitled(block, place)

    def _write(self, block: Block) -> None:
        target = self.folder / str(block.title)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.text, encoding="utf-8")

    def _execute(self, source: str, page: Path, line: int, shown: str | None) -> None:
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout), pytest.MonkeyPatch.context() as patch:
            patch.setitem(
                sys.modules, "__main__", self.session
            )  # compilers look names up in a function's module
            exec(compile("\n" * (line - 1) + source, str(page), "exec"), vars(self.session))  # noqa: S102  # our own
        if shown is not None:
            assert matches(shown, stdout.getvalue()), f"{page}:{line} printed:\n{stdout.getvalue()}"

    def _type(self, text: str, place: str) -> None:
        """Run the lines that begin with a prompt; the lines after each are its output, where any are shown."""
        commands = re.split(r"^\$ ", text, flags=re.M)[1:]
        assert commands, f"{place} shows no '$ command'"
        for command, following in pairwise([*commands, ""]):
            line, _, shown = command.partition("\n")
            handled = following.startswith("echo $?")
            stdout, stderr = self._enter(line, place, handled=handled)
            if shown.strip():
                terminal = stderr + stdout if handled else stdout
                assert matches(shown, terminal), f"{place}: {line} printed:\n{stdout}{stderr}"

    def _paste(self, text: str, shown: str | None, place: str) -> None:
        """Run the lines of a block without prompts; what is shown is the output of all of them."""
        printed = "".join(self._enter(line, place)[0] for line in text.splitlines() if line)
        assert shown is None or matches(shown, printed), f"{place} printed:\n{printed}"

    def _enter(self, line: str, place: str, *, handled: bool = False) -> tuple[str, str]:
        """Run one line, which must succeed unless its failure is ``handled`` by the next."""
        if line.startswith("make "):
            check_make_target(line, place)
            return "", ""
        if line.startswith("opgraft serve "):
            return self._serve(line), ""
        stdout, stderr = self._run(line)
        assert self.status == 0 or handled, (
            f"{place}: {line} ended with {self.status}:\n{stdout}{stderr}"
        )
        assert not re.match("pip ", line) or "WARNING" not in stderr, f"{place}: {stderr}"
        return stdout, stderr

    def _serve(self, line: str) -> str:
        """Start a server, which runs until the page is read, and return what it prints until it is ready."""
        command = f"exec {line} --port 0"  # a process of its own, which can be ended
        self.server = subprocess.Popen(
            ["bash", "-c", command], env=self.variables, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        printed = ""
        while "\nurl" not in printed:
            shown = self.server.stdout.readline()
            assert shown, f"{line} ended after {printed}"
            printed += shown
        self.address = printed.split("http://")[-1].split("/")[0]
        return printed.replace(self.address, SERVED)

    def end(self) -> None:
        """End the server, if one was started."""
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(60) == 0
            self.server.stdout.close()

    def _run(self, line: str) -> tuple[str, str]:
        """One line in a shell that goes on where the last one ended: folder, variables and status."""
        here = Path(self.variables.get("PWD", self.folder))
        if here == self.folder and re.fullmatch(rf"pip install {_OPGRAFT_ITSELF}", line):
            line = line.replace(
                "pip install", "pip install --dry-run"
            )  # what is installed already is under test
        line = line.replace(SERVED, self.address)
        after = self.environment / "after"
        script = f"(exit {self.status}); {line}\nstatus=$?; env -0 > '{after}'; exit $status"
        result = subprocess.run(
            ["bash", "-c", script],
            cwd=here,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        self.status = result.returncode
        pairs = [entry.partition("=") for entry in after.read_text().split("\0") if entry]
        self.variables = {name: value for name, _, value in pairs}
        if line.startswith("pip "):
            opgraft.reset()  # a Python session that is started from now on sees what pip changed
        return result.stdout, result.stderr


def check_make_target(line: str, place: str) -> None:
    targets = [word for word in line.partition("#")[0].split()[1:] if "=" not in word]
    for target in targets:
        assert target in COMMANDS, f"{place}: the Makefile has no target {target!r}"


def check_untitled(block: Block, place: str) -> None:
    """Blocks that are neither run nor written must at least be what they say they are."""
    parsers: dict[str, Callable[[str], object]] = {"toml": tomllib.loads, "json": json.loads}
    if block.language in parsers:
        parsers[block.language](block.text)
    else:
        assert block.language in ("text", "diff"), (
            f"{place}: a block of unknown language {block.language!r}"
        )


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Reader]:
    """A reader with a checkout to work in and a virtual environment of their own, on top of the packages here."""
    if opgraft.current_platform().name != "cpu":
        pytest.skip("the pages show a machine without accelerators")
    folder, environment = tmp_path / "checkout", tmp_path / "venv"
    folder.mkdir()
    for name in (
        "core",
        "platforms",
        "plugins",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "examples",
    ):
        (folder / name).symlink_to(REPOSITORY / name)
    built = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY / "reference_plugins", folder / "reference_plugins", ignore=built)
    packages = make_environment(environment, warm_python)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(packages))
    # TorchCTS writes no results on a worker of pytest, and a reader is on none.
    unknown = ("COLUMNS", "PWD", "PYTHONPATH", "PYTEST_XDIST_WORKER")
    variables = {name: value for name, value in os.environ.items() if name not in unknown}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    if shutil.which("g++"):
        variables["CXX"] = compiler()
    if FOREIGN:
        variables["OPGRAFT_PLUGINS_DISABLE"] = ",".join(FOREIGN)
    before, level = set(sys.modules), logger.level
    monkeypatch.setattr(logger, "handlers", [*logger.handlers])  # a page adds its own
    made = Reader(folder, environment, variables)
    yield made
    made.end()
    logger.setLevel(level)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def make_environment(folder: Path, warm_python: str) -> Path:
    """A virtual environment with ``python``, ``pip`` and ``opgraft`` that sees the packages of this one."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    outer = [
        f"import site; site.addsitedir({entry!r})" for entry in sys.path if "site-packages" in entry
    ]
    (packages / "outer.pth").write_text("\n".join(outer))
    python, options = folder / "bin" / "cold-python", "--quiet --disable-pip-version-check"
    python.symlink_to(os.path.realpath(sys.executable))
    start = f"#!{warm_python}\n{IN_ENVIRONMENT.format(folder=str(folder), packages=str(packages))}"
    scripts = {
        "opgraft": start + COMMAND_LINE,
        "python": start + INTERPRETER.format(python=str(python)),
        "pip": "#!/bin/sh\n"
        'if [ "$1" = install ]; then shift; set -- install --no-deps --no-build-isolation "$@"; fi\n'
        f'exec {sys.executable} -m pip {options} --python {python} "$@"\n',
    }
    for name, text in scripts.items():
        (folder / "bin" / name).unlink(missing_ok=True)
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return packages


@pytest.fixture(scope="session")
def blocks_of() -> Callable[[Path], list[Block]]:
    """Reads the fenced blocks of a page."""
    return read_blocks
