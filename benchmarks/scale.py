"""Costs of many distributions, plugins and replacements: a site of real ones, and the same process without them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.signing import Root
from support.wheels import pip, plugin_and_dependency
from timing import Row, report

DISTRIBUTIONS, PLUGINS, REPLACEMENTS = 1000, 50, 500
ROUNDS = 5

PLUGIN = """
import opgraft.ops
from opgraft.registry.state import host_state
platforms = "any"
ops = list(host_state().registry.ops.values())
for number in range({each}):
    target = ops[({plugin} * {each} + number) % len(ops)].cls
    def forward_oot(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)
    members = {{"forward_oot": forward_oot, "__module__": __name__}}
    target.register_oot(priority={plugin} + 1)(type(f"Scale{plugin}x{{number}}", (target,), members))
"""

RESOLVE = """
import json, sys, time, tracemalloc
start = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - start
import opgraft
from opgraft.plugins.discovery import discover
from opgraft.registry.state import host_state
start = time.perf_counter()
discover()
seconds = time.perf_counter() - start
import opgraft.ops
from opgraft.ops import ReLUSquaredActivation
if sys.argv[1] == "memory":
    tracemalloc.start()
start = time.perf_counter()
opgraft.load_plugins()
ReLUSquaredActivation()
seconds += time.perf_counter() - start
held = tracemalloc.get_traced_memory()[0] if sys.argv[1] == "memory" else 0
constructions = []
for _ in range(9):
    start = time.perf_counter()
    for _ in range(1000):
        ReLUSquaredActivation()
    constructions.append((time.perf_counter() - start) / 1000)
state = host_state()
print(json.dumps({"torch": torch_seconds, "resolve": seconds, "construct": min(constructions), "held": held,
    "plugins": sum(each.status.value == "activated" for each in state.plugins.values()), "active": len(state.active)}))
"""


LOCKED = """
import json, sys, time
from opgraft.plugins.discovery import discover
providers = list(discover().distributions)
start = time.process_time()
from opgraft.plugins.locking import lockfile
locked = lockfile(sys.argv[1], "the benchmark")
changes = [locked.against(provider) for provider in providers]
print(json.dumps({"seconds": time.process_time() - start, "changes": changes}))
"""
TOY_NPU = Path(__file__).parents[1] / "reference_plugins/opgraft-toy-npu"


def starts_with_lockfile() -> Iterator[Row]:
    """Measure starts with the toy NPU locked, and with a plugin that has a dependency and a signer."""
    with tempfile.TemporaryDirectory() as name:
        site = Path(name) / "site"
        pip("--no-build-isolation", "--target", str(site))(site, [TOY_NPU])
        yield start_with_lockfile("the toy NPU", site)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = plugin_and_dependency(folder)
        pip("--target", "FOLDER")(folder / "site", wheels)
        root = Root()
        for wheel in wheels:
            root.attest(wheel, "acme/probe")
        trusted = root.write(folder / "root.json")
        signed = ("--identity", str(folder), "--trust-root", str(trusted))
        name_of_row = "a plugin with a dependency, both attested"
        yield start_with_lockfile(name_of_row, folder / "site", *signed)


def start_with_lockfile(what: str, site: Path, *options: str) -> Row:
    """Measure what a start with a locked plugin takes: importing the reader, and comparing all files."""
    path = site.with_name("opgraft.lock")
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(site)}
    lock = [sys.executable, "-m", "opgraft", "plugins", "lock", "--output", str(path), *options]
    subprocess.run(lock, env=environ, check=True, stdout=subprocess.DEVNULL)
    if options and '"attestation": ' not in path.read_text(encoding="utf-8"):
        raise RuntimeError("no attestation was kept")
    files = sum(len(names) for _, _, names in os.walk(site))
    command = [sys.executable, "-c", LOCKED, str(path)]
    seconds = []
    for _ in range(2 * ROUNDS):
        done = subprocess.run(command, env=environ, check=True, capture_output=True)
        told = json.loads(done.stdout)
        if told["changes"] != [None]:
            raise RuntimeError(f"the plugin is not as it was locked: {told}")
        seconds.append(told["seconds"])
    # The first one writes bytecode.
    measured = statistics.median(seconds[1:]) * 1000
    size = f"a lockfile of {path.stat().st_size:,} bytes"
    detail = f"{files} files, {size}, processor time, {len(seconds) - 1} processes"
    return Row(f"start with a lockfile of {what}, ms", measured, 5, detail)


def build(folder: Path) -> None:
    """Install the distributions: each has a module, metadata and scripts, some a plugin."""
    for number in range(DISTRIBUTIONS):
        name = f"scale_{number}"
        plugin = number * PLUGINS // DISTRIBUTIONS
        offers = number * PLUGINS % DISTRIBUTIONS == 0
        source = (
            PLUGIN.format(plugin=plugin, each=REPLACEMENTS // PLUGINS)
            if offers
            else "def main(): ...\n"
        )
        (folder / f"{name}.py").write_text(source)
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\nRequires-Dist: opgraft\n\n"
        (info / "METADATA").write_text(text + "A description.\n" * 100)
        group = "opgraft.plugins" if offers else "console_scripts"
        (info / "entry_points.txt").write_text(
            f"[{group}]\n{name} = {name}{'' if offers else ':main'}\n"
        )
        (info / "RECORD").write_text(f"{name}.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


def resolve(folder: Path | None, kind: str = "time") -> dict[str, Any]:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(folder or "")}
    command = [sys.executable, "-c", RESOLVE, kind]
    return dict(
        json.loads(subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE).stdout)
    )


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        # The first one writes bytecode.
        rounds = [(resolve(folder), resolve(None)) for _ in range(ROUNDS + 1)][1:]
        held = [resolve(place, "memory")["held"] for place in (folder, None)]
    large, none = rounds[0]
    if (large["plugins"], large["active"] - none["active"]) != (PLUGINS, REPLACEMENTS):
        raise RuntimeError(
            f"not all plugins are active, so these would be figures of less: {large}"
        )
    detail = f"{DISTRIBUTIONS:,} distributions, {PLUGINS} plugins, {REPLACEMENTS} replacements"
    shares = [many["resolve"] / many["torch"] for many, _ in rounds]
    slower = [many["construct"] / few["construct"] for many, few in rounds]
    return [
        Row(
            "resolving / import torch", statistics.median(shares), 0.2, f"{detail}, {ROUNDS} rounds"
        ),
        Row(
            "constructing an op there / without them",
            statistics.median(slower),
            1.1,
            f"{ROUNDS} rounds of 9,000",
        ),
        Row("memory that the records take, MB", (held[0] - held[1]) / 1e6, 10, detail),
        *starts_with_lockfile(),
    ]


if __name__ == "__main__":
    report("What many distributions and plugins cost.", measure)
