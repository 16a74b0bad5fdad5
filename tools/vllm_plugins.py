"""Run public plugins of vLLM through the bridge, and write into its README which of their entry points load.

Their wheels are unpacked in the user's cache, without what they depend on. Each runs in a process of its own, with no
device of the vendor: if the function of a platform finds none, the class that its module names is loaded all the same.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

BRIDGE = Path(__file__).parents[1] / "reference_plugins/opgraft-vllm-bridge"
PAGE = BRIDGE / "README.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "opgraft/vllm-plugins"
PLUGINS = {
    "aleph-alpha-inference": "1.0.0",
    "duplexjev-vllm": "0.3.0",
    "exionos-vllm": "0.1.0",
    "flash-head": "0.1.10",
    "hotwire-vllm": "0.1.2",
    "jina-v4-vllm-plugin": "0.1.1",
    "optimum-neuron": "0.4.5",
    "pace-vllm": "1.3.0",
    "qwerky-vllm-models": "0.2.71",
    "sabi-mla-vllm": "0.2.0",
    "sendnn-inference": "2.6.3",
    "terratorch": "1.2.13",
    "tpu-inference": "0.32.0",
    "vllm-ascend": "0.23.0",
    "vllm-beam-search-plugin": "0.1.5",
    "vllm-bnb-plugin": "0.0.3",
    "vllm-canon": "0.1.0",
    "vllm-dolphin": "0.2",
    "vllm-factory": "0.2.1",
    "vllm-iquest-q1": "0.1.1",
    "vllm-kunlun": "0.11.1",
    "vllm-lens": "1.3.0",
    "vllm-mbart": "0.1",
    "vllm-mblt": "0.8.0",
    "vllm-metal": "0.1.0",
    "vllm-musa": "0.1.1",
    "vllm-omni": "0.30.0",
    "vllm-plugin-meralion2": "0.3.0",
    "vllm-rbln": "0.12.0",
    "vllm-spark2-5-plugin": "0.1.0",
    "vllm-spyre": "1.10.0",
    "vllm-spyre-next": "0.1.0",
    "vllm-swift": "0.3.2",
    "vllm-xtu-moe": "0.2.7",
}
"""Names of distributions to the versions that are run."""

BESIDE = {
    "hotwire-vllm": {"triton": "3.7.1"},
    "vllm-dolphin": {"vllm-mbart": "0.1"},
    "vllm-factory": {"gliner": "0.2.29", "triton": "3.7.1"},
    "vllm-lens": {"zstandard": "0.25.0"},
}
"""Names of distributions to others that they import and that this environment lacks."""

_HEAD = (
    "| plugin | platform | general entry points | ops | names answered |\n|---|---|---|---|---|\n"
)
_TABLE = re.compile(rf"(?<={re.escape(_HEAD)})(\|.*\n)*", re.M)
_SECONDS = 120
_PLATFORMS = (
    "manylinux_2_34_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux2014_x86_64",
    "any",
    "macosx_11_0_arm64",
)
"""The platforms of wheels, the preferred ones first."""

RUN = """
import importlib, json, re, sys
sys.path[:0] = sys.argv[2:]
import torch
from packaging.utils import canonicalize_name
from opgraft.plugins.bridges import discover
from opgraft.registry.state import host_state
from opgraft_vllm_bridge import adapting, listing, offers, reading

CLASS = re.compile(r"[\\"']((?:\\w+\\.)+\\w*Platform)[\\"']")

def why(error):
    text = " ".join(str(error).split())
    module = re.search(r"No module named '([\\w.]+)'", text)
    name = re.search(r" (vllm(?:\\.\\w+)+) at ", text)
    if module:
        return f"needs {module[1]}"
    return f"lacks {name[1]}" if name else f"{type(error).__name__}: {text[:60]}"

def classes_named_in(offer):
    files = [importlib.import_module(offer.module).__file__]
    files += [file for _, file in reading.modules_of(offer.package)]
    texts = (open(file).read() for file in files)
    return [found for text in texts for found in CLASS.findall(text)]

def platform(offer):
    path = offers._function(offer)()
    paths = [path] if path else classes_named_in(offer)
    if not paths:
        raise LookupError("finds no device, and names no class")
    module, _, name = paths[0].rpartition(".")
    cls = adapting.adapted(offer, getattr(importlib.import_module(module), name))
    with adapting.loading(cls):
        offers.import_op_modules(offer, {offer.package, module.partition(".")[0]})

found = {"platforms": {}, "general": {}}
own = [each for each in discover().offers if canonicalize_name(each.provider.name) == sys.argv[1]]
for offer in own:
    is_platform = offer.stands_in == "vllm.platform_plugins"
    kind = found["platforms" if is_platform else "general"]
    try:
        platform(offer) if is_platform else offers._function(offer)()
        kind[offer.name] = "loads"
    except BaseException as error:
        kind[offer.name] = why(error)
found["ops"] = len(host_state().registry.replacements)
names = listing.listing_of(*sorted({offer.package for offer in own}))
found["names"] = [len(names.answered), len(names.answered) + len(names.missing)]
print("\\n" + json.dumps(found))
"""


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """Return the page with the table as it must be; fetch the wheels that are not there."""
    runs = {name: run(name) for name in PLUGINS}
    rows = "".join(_row(name, found) for name, found in runs.items())
    return with_table(text, rows + _totals(runs))


def with_table(text: str, table: str) -> str:
    """Return the page with other rows in its table."""
    renewed, count = _TABLE.subn(lambda _: table, text)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} tables with this head, and must have 1")
    return renewed


def fetched(name: str, version: str) -> Path:
    """Return the folder of a distribution's files."""
    folder = CACHE / f"{name}-{version}"
    complete = folder / "complete"
    if not complete.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        wheels = folder / "wheels"
        requirement = f"{name}=={version}"
        own = f"{sys.version_info.major}.{sys.version_info.minor}"
        # Of a wheel for another Python or processor, the modules in Python can be loaded.
        if not (_downloads(requirement, own, wheels) or _downloads(requirement, "3.12", wheels)):
            raise SystemExit(f"pip finds no wheel of {requirement}")
        (wheel,) = wheels.iterdir()
        zipfile.ZipFile(wheel).extractall(folder)
        shutil.rmtree(wheels)
        complete.touch()
    return folder


def _downloads(requirement: str, python: str, folder: Path) -> bool:
    """Download the wheel for a version of Python, and return True if there is one."""
    options = "--quiet --no-deps --only-binary :all:"
    for platform in _PLATFORMS:
        options += f" --platform {platform}"
    command = f"-m pip download {options} --python-version {python} --dest {folder} {requirement}"
    result = subprocess.run([sys.executable, *command.split()], check=False)  # noqa: S603  # our own words
    return result.returncode == 0


def run(name: str) -> dict[str, Any]:
    """Run the entry points of a plugin in a process, and return their outcomes."""
    needed = {name: PLUGINS[name], **BESIDE.get(name, {})}
    folders = [_bridge(), *(str(fetched(*each)) for each in needed.items())]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", RUN, name, *folders]
    return outcome_of(name, command, environ)


def outcome_of(
    name: str, command: list[str], environ: dict[str, str], seconds: float = _SECONDS
) -> dict[str, Any]:
    """Return the outcomes that a process prints in its last line, or one outcome: how it has ended.

    In the second case, this process prints what the process has said.
    """
    try:
        result = subprocess.run(  # noqa: S603  # our own words
            command,
            env=environ,
            # This folder has packages, such as plugins, that would hide a plugin's own.
            cwd=tempfile.gettempdir(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return _unanswered(name, f"no answer in {seconds} s", error.stderr)
    if result.returncode < 0:
        return _unanswered(name, f"ends (signal {-result.returncode})", result.stderr)
    try:
        found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return _unanswered(name, f"ends (exit code {result.returncode})", result.stderr)
    return found


def _unanswered(name: str, outcome: str, stderr: str | bytes | None) -> dict[str, Any]:
    """Return the outcome of a process without an answer, and print what the process has said."""
    said = stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr or ""
    print(f"{name} {outcome}:\n{said}", file=sys.stderr)
    return {"platforms": {}, "general": {"(the process)": outcome}, "ops": 0, "names": None}


@functools.cache
def _bridge() -> str:
    """Return a folder in which the bridge is installed as it is now: it is installed nowhere else."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    # A copy, as a build leaves files beside the source.
    source = shutil.copytree(BRIDGE, folder / "source")
    pip = f"-m pip install --quiet --no-deps --no-build-isolation --target {folder / 'site'}"
    subprocess.run([sys.executable, *pip.split(), str(source)], check=True)  # noqa: S603  # our own words
    return str(folder / "site")


def _row(name: str, found: dict[str, Any]) -> str:
    names = ""
    if found["names"] is not None:
        answered, used = found["names"]
        names = f"{answered:,} of {used:,}"
    platforms = _told(found["platforms"])
    general = _told(found["general"])
    return (
        f"| {name} {PLUGINS[name]} | {platforms} | {general} | {found['ops'] or ''} | {names} |\n"
    )


def _told(outcomes: dict[str, str]) -> str:
    loaded = [name for name, outcome in outcomes.items() if outcome == "loads"]
    rest = [outcome for outcome in outcomes.values() if outcome != "loads"]
    parts = []
    if loaded:
        parts.append(f"{len(loaded)} of {len(outcomes)} load" if len(outcomes) > 1 else "loads")
    return "; ".join(parts + list(dict.fromkeys(rest)))


def _totals(runs: dict[str, dict[str, Any]]) -> str:
    cells = []
    for kind in ("platforms", "general"):
        outcomes = [outcome for found in runs.values() for outcome in found[kind].values()]
        cells.append(f"{outcomes.count('loads')} of {len(outcomes)} load")
    return f"| **all** | {cells[0]} | {cells[1]} | | |\n"


if __name__ == "__main__":
    main()
