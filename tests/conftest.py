"""Every test starts from a fresh host, an environment without OPGRAFT_ variables and no plugin but its own."""

from __future__ import annotations

import base64
import functools
import gc
import hashlib
import importlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from opgraft.compat import intervening
from opgraft.config.environment import SIMULATED_DEVICE
from opgraft.plugins import discovery
from opgraft.testing.isolation import isolated_host
from support.simulated_device import skip_unfit
from support.slow_variants import mark_slow
from support.warm.interpreter import warm_interpreter, warm_interpreter_for_children
from torch import nn

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # which its library reads when it is imported, here and in processes to come
)
os.environ.setdefault(
    "SYMPY_CACHE_SIZE", "100000"
)  # of 1000 as is, compilers work out the same sizes over and over

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as of what a shell starts in the background, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as of what 'nohup' starts
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile("untimed", deadline=None)  # machines may be busy
hypothesis.settings.load_profile("untimed")

REPOSITORY = Path(__file__).parent.parent
TOY_NPU = REPOSITORY / "reference_plugins" / "opgraft-toy-npu"


_SIMULATED = os.environ.get(SIMULATED_DEVICE)
"""The device of ``make test-simulated``, which every test of the run has."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what '-m' does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow variants, and skip what needs a GPU, visibly, where there is none.

    torch is asked only if a test needs a GPU.
    """
    mark_slow(items)
    if _SIMULATED:
        skip_unfit(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is false"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


gc.disable()  # while modules are imported and items made, which all stay


def pytest_collection_finish() -> None:
    """Register the catalogue before any test, and spare the collector what stays to the end: items and libraries."""
    # Not above: a process that only hands out tests needs no torch.
    for registered in ("opgraft.ops", "opgraft.models"):
        importlib.import_module(registered)
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        20_000
    )  # of 700 as is, a tenth of all time goes into looking through what compilers keep
    gc.enable()


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Let ``gc.collect`` look only at objects that are made from here on.

    A process that has run thousands of tests holds millions of objects: each collection of them takes two seconds.
    """
    gc.collect()  # garbage that is frozen stays, with the threads of its engines
    gc.freeze()


_scan = discovery.scan
_FOREIGN = {offer.provider.name for offer in _scan().offers if not offer.built_in}


@functools.cache
def _lasting(path: tuple[str, ...]) -> discovery.Discovery:
    """What is installed in folders that no test writes to, read once: hosts are reset ten thousand times."""
    return _scan()


_numbers = itertools.count()
_METHODS = {name: getattr(nn.Module, name) for name in ("__call__", "__getattr__", "__setattr__")}


@pytest.fixture(autouse=True)
def fresh_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A reset host, whose registry forgets afterwards what the test declared."""
    for name in os.environ:
        if name.startswith("OPGRAFT_"):
            monkeypatch.delenv(name)
    if _SIMULATED:
        monkeypatch.setenv(SIMULATED_DEVICE, _SIMULATED)
    # The cache is on by default. No test writes to the folder of this machine's user.
    monkeypatch.setenv("OPGRAFT_COMPILATION_CONFIG_CACHE", "false")
    written = str(tmp_path_factory.getbasetemp())
    monkeypatch.setenv(
        "PYTEST_DEBUG_TEMPROOT", written
    )  # pytests that tests run tidy up where no other one does
    monkeypatch.setenv(
        "XDG_STATE_HOME", f"{written}/states/{next(_numbers)}"
    )  # no quarantine outlives its test

    def scan_without_foreign_plugins() -> discovery.Discovery:
        entries = [entry if isinstance(entry, str) else written for entry in sys.path]
        lasts = all(os.path.isabs(entry) and not entry.startswith(written) for entry in entries)
        found = _lasting(tuple(sys.path)) if lasts else _scan()
        own = [offer for offer in found.offers if offer.provider.name not in _FOREIGN]
        settings = {
            name: field
            for name, field in found.settings.items()
            if field.provider.partition(" ")[0] not in _FOREIGN
        }
        sections = {
            provider: offer
            for provider, offer in found.sections.items()
            if provider.name not in _FOREIGN
        }
        return discovery.Discovery(
            own,
            [*found.problems],
            found.distributions,
            found.groups,
            sections=sections,
            settings=settings,
        )

    monkeypatch.setattr(discovery, "scan", scan_without_foreign_plugins)
    with isolated_host(forget_plugins=True):
        yield
    # Later tests in this process would fail for it.
    hooks = intervening.hooks_of_every_module()
    replaced = [name for name, method in _METHODS.items() if getattr(nn.Module, name) is not method]
    left = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), any(hooks), replaced
    if left != (True, False, False, []):
        torch.set_grad_enabled(True)
        torch.inference_mode(False).__enter__()
        intervening.set_hooks_of_every_module([{} for _ in hooks])
        for name in replaced:
            setattr(nn.Module, name, _METHODS[name])
        pytest.fail(
            f"gradients are recorded: {left[0]}, inference mode: {left[1]}, hooks of every module: {hooks}, "
            f"replaced methods of every module: {replaced}"
        )


class Site:
    """A folder on ``sys.path`` in which distributions are installed, with the metadata that pip would write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        name: str,
        files: Mapping[str, str],
        entry_points: Mapping[str, Sequence[str]] | str,
        *,
        version: str = "1.0",
        requires: Sequence[str] = ("opgraft",),
    ) -> None:
        """Install a distribution: its modules by file name, its entry points by group (or as raw text)."""
        for path, text in files.items():
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        if not isinstance(entry_points, str):
            entry_points = "\n".join(
                f"[{group}]\n" + "\n".join(lines) for group, lines in entry_points.items()
            )
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needed = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}"
        )
        (info / "entry_points.txt").write_text(entry_points + "\n")
        (info / "INSTALLER").write_text("pip\n")
        written = [self.folder / path for path in files] + sorted(info.iterdir())
        (info / "RECORD").write_text("".join(map(self._row, written)) + f"{info.name}/RECORD,,\n")

    def _row(self, file: Path) -> str:
        content = file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        return f"{file.relative_to(self.folder)},sha256={digest},{len(content)}\n"

    def plugin(
        self,
        name: str,
        source: str,
        *,
        requires: Sequence[str] = ("opgraft",),
        version: str = "1.0",
    ) -> None:
        """Install a distribution ``name`` with one module that is a plugin of the same name."""
        module = name.replace("-", "_")
        points = {"opgraft.plugins": [f"{module} = {module}"]}
        self.install(name, {f"{module}.py": source}, points, requires=requires, version=version)

    def platform(
        self, name: str, *, probe: str, platform: str = "", plugin: str | None = None
    ) -> None:
        """Install a distribution that offers the platform ``name``, and a plugin where its source is given."""
        files = {
            f"{name}_device.py": f"from opgraft import Evidence, PlatformSpec\ndef probe(machine):\n    {probe}\n"
            f"SPEC = PlatformSpec(probe, '{name}_platform:Device')\n",
            f"{name}_platform.py": platform or platform_source(name),
        }
        points = {"opgraft.platforms": [f"{name} = {name}_device:SPEC"]}
        if plugin is not None:
            files[f"{name}_plugin.py"] = plugin
            points["opgraft.plugins"] = [f"{name} = {name}_plugin"]
        self.install(f"{name}-dist", files, points)


def platform_source(name: str, chain: str = '("native",)') -> str:
    """A platform class ``Device`` that behaves like the CPU under another name and dispatch chain."""
    return (
        "from opgraft.platforms.cpu.platform import CpuPlatform\n"
        f"class Device(CpuPlatform):\n    name = {name!r}\n    dispatch_chain = {chain}\n"
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A place to install distributions; their modules are forgotten after the test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def toy_npu_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference plugin, built and installed by pip into a folder of its own."""
    folder = tmp_path_factory.mktemp("toy-npu")
    source = folder / "source"
    subprocess.run(["cp", "-r", str(TOY_NPU), str(source)], check=True)
    pip_install(source, folder / "site")
    return folder / "site"


def pip_install(source: Path, folder: Path) -> None:
    """Build and install a distribution into a folder, without its dependencies and without network."""
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)


@pytest.fixture
def toy_npu(toy_npu_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reference plugin on ``sys.path`` with its device present; yields the folder it is installed in."""
    monkeypatch.syspath_prepend(str(toy_npu_site))
    monkeypatch.setenv("TOY_NPU_DEVICE", str(TOY_NPU / "device.json"))
    yield toy_npu_site
    for name in [name for name in sys.modules if name.partition(".")[0] == "opgraft_toy_npu"]:
        del sys.modules[name]


Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def warm_python() -> str:
    """An interpreter that has torch imported when it starts; see ``support/warm/interpreter.py``."""
    return warm_interpreter()


@pytest.fixture(scope="module")
def warm_workers(warm_python: str) -> Iterator[None]:
    """Processes of workers start with torch imported; ``interpreter.process_of`` tells which one works."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", warm_python)
        yield


@pytest.fixture(scope="module")
def warm_children(warm_python: str) -> Iterator[None]:
    """Probes and other isolated code run in processes that have torch imported, for tests of other things."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", warm_interpreter_for_children())
        yield


@pytest.fixture
def cli(site: Site, tmp_path: Path, warm_python: str) -> Cli:
    """Run the command line as its own process, seeing the distributions of ``site``."""
    return _command_line(warm_python, site, tmp_path)


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``run --compare`` in this process measure a round instead of a second."""
    monkeypatch.setattr("opgraft.cli.comparison._ENOUGH", 1e-9)


@pytest.fixture
def cold_cli(site: Site, tmp_path: Path) -> Cli:
    """``cli`` in an interpreter that has imported nothing, for what depends on how torch is imported."""
    return _command_line(sys.executable, site, tmp_path)


def _command_line(python: str, site: Site, folder: Path) -> Cli:
    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(site.folder), *filter(None, [variables.pop("PYTHONPATH", "")])])
        environ = {**os.environ, "PYTHONPATH": path, **variables}
        if _FOREIGN:
            environ.setdefault("OPGRAFT_PLUGINS_DISABLE", ",".join(_FOREIGN))
        command = [python, "-m", "opgraft", *arguments]
        return subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of the system, or else Playwright's own."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        path = (
            shutil.which("chromium")
            or shutil.which("chromium-browser")
            or shutil.which("google-chrome")
            or own
        )
        if not Path(path).is_file():
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        with driver.chromium.launch(executable_path=path) as running:
            yield running
