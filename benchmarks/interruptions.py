"""Kill processes at random moments, and look at the next start; run by ``make test-interruptions``.

Each scene runs in a process of its own. A run is correct if the next start reads whole files, loads the
plugin, has the platform or gives the same tokens, without any repair. Exit code 1: a run is not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import opgraft
import opgraft.ops

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from conftest import Site
from interrupted_handovers import front_end, in_handovers
from opgraft import LLM, SamplingParams
from opgraft.compilation.cache import CompilationCache
from opgraft.engine.workers.process_executor import LocalProcess
from opgraft.plugins import quarantine
from opgraft.plugins.selection import selected_platform
from opgraft.registry.state import host_state
from support.faults.store_rows import WRITERS
from support.random_decoders import written
from support.small_tokenizers import trained_tokenizer
from timing import machine, this_run

FORK = multiprocessing.get_context("fork")
"""Processes start with opgraft imported, as a start anew takes seconds."""

SHARES = {
    **dict.fromkeys(WRITERS, 0.115),
    "an entry of the cache": 0.13,
    "the import of a plugin": 0.17,
    "a probe": 0.12,
    "a worker": 0.1,
    "a Ray actor": 0.02,
    "a process of a handover": 0.3,
    "a front end with a handover": 0.03,
}
"""The scenes, each with its share of the runs."""

WHOLE = 100_000
KEY = "0" * 40
PLUGIN = """
import time, opgraft
from opgraft.ops import SiLU
platforms = "any"
time.sleep(0.01)
class Slow(SiLU):
    def forward_oot(self, input):
        return self.forward_native(input)
time.sleep(0.01)
@opgraft.hookimpl
def opgraft_register_ops():
    time.sleep(0.01)
    SiLU.register_oot(Slow)
    time.sleep(0.01)
"""
PROBE = "import time; time.sleep(0.05); return Evidence(True, 'found')"
MODEL: dict[str, Any] = {
    "model.dtype": "float32",
    "model.max_model_len": 64,
    "cache.num_blocks": 64,
    "load.progress": False,
    "parallel.tensor": 2,
}

Answer = tuple[str, list[int]]
"""The reason for the end of a request, and its tokens."""

Check = Callable[[], None]
"""Raises if a start is not correct."""


def killed(works: list[Callable[[], None]], longest: float, chance: random.Random) -> bool:
    """Run functions in processes, and kill these at a random moment. Return False if all had ended."""
    processes = [FORK.Process(target=work) for work in works]
    for process in processes:
        process.start()
    time.sleep(chance.uniform(0, longest))
    alive = any(process.is_alive() for process in processes)
    for process in processes:
        if process.pid is not None:
            # Only the process itself: what it has started must end alone.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        process.join()
    return alive


def fault_of(check: Check) -> str:
    """Return the fault of the next start, a process of its own; empty if there is none."""
    ours, theirs = FORK.Pipe(duplex=False)

    def look() -> None:
        try:
            check()
            theirs.send("")
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = FORK.Process(target=look)
    process.start()
    # With the last other end open, a crash of the check would look like silence.
    theirs.close()
    try:
        told = ours.recv() if ours.poll(120) else "it does not end"
    except EOFError:
        process.join()
        told = f"it crashes with the exit code {process.exitcode}"
    process.kill()
    process.join()
    return str(told)


def forever(write: Callable[[int], object]) -> Callable[[], None]:
    def work() -> None:
        for number in range(10**9):
            write(number)

    return work


def expect(is_so: object, words: str) -> None:
    if not is_so:
        raise RuntimeError(words)


def store(folder: Path, name: str) -> tuple[list[Callable[[], None]], Check]:
    """Two processes that write one file at once."""
    write, read = WRITERS[name]
    found: dict[str, Any] = {}
    exec(f"from pathlib import Path\nfolder = {str(folder)!r}\n{write}\n{read}", found)  # noqa: S102
    found["write"](0)

    def check() -> None:
        expect(found["read"]() == WHOLE, "the file is not whole")
        found["write"](1)
        expect(found["read"]() == WHOLE, "the file cannot be written again")

    return [forever(found["write"])] * 2, check


def cache(folder: Path) -> tuple[list[Callable[[], None]], Check]:
    """Two processes that write one entry of the cache of compiled code at once."""
    kept = CompilationCache(folder / "cache", 1 << 24)

    def write(number: int) -> None:
        with kept.locked(KEY), kept.written(KEY) as (entry, description):
            description["number"] = number
            for name in ("code", "more"):
                (entry / name).write_bytes(bytes([number % 256]) * WHOLE)

    def read() -> None:
        found = kept.read(KEY)
        if found is not None:
            entry, description = found
            content = (entry / "code").read_bytes()
            expect(content == (entry / "more").read_bytes(), "its files are of two entries")
            expect(content[0] == description["number"] % 256, "its files are of another entry")

    def check() -> None:
        read()
        write(3)
        read()
        expect(kept.read(KEY), "the entry is not there")

    return [forever(write)] * 2, check


def plugin_import(folder: Path) -> tuple[list[Callable[[], None]], Check]:
    def check() -> None:
        opgraft.load_plugins()
        record = host_state().plugins["acme"]
        expect(record.status.value == "activated", f"it is {record.status.value}: {record.reason}")
        expect(not quarantine.findings(), "a record of a quarantine cannot be used")

    return [opgraft.load_plugins], check


def probe(folder: Path) -> tuple[list[Callable[[], None]], Check]:
    def check() -> None:
        chosen = selected_platform().platform.name
        expect(chosen == "acme_device", f"the platform is {chosen}")

    def work() -> None:
        selected_platform()

    return [work], check


def in_stores(name: str, runs: int, folder: Path, chance: random.Random) -> Iterator[str]:
    """Yield the fault of each run of a scene with processes that are forked."""
    site = Site(folder / "site")
    site.folder.mkdir()
    if name == "a probe":
        site.platform("acme_device", probe=PROBE)
    elif name == "the import of a plugin":
        site.plugin("acme", PLUGIN)
    sys.path.insert(0, str(site.folder))
    opgraft.reset()
    scenes = {
        "an entry of the cache": cache,
        "the import of a plugin": plugin_import,
        "a probe": probe,
        "a front end with a handover": front_end,
    }
    works, check = scenes[name](folder) if name in scenes else store(folder, name)
    begin = time.monotonic()
    yield fault_of(check)
    # Writers never end. A kill anywhere in what the others take is as likely.
    is_writing = name in (*WRITERS, "an entry of the cache")
    longest = 0.1 if is_writing else time.monotonic() - begin
    done = 1
    while done < runs:
        if killed(works, longest, chance):
            done += 1
            yield fault_of(check)


@contextmanager
def engine(folder: Path, executor: str, runs: int) -> Iterator[LLM]:
    model = folder / "llama"
    written("Llama", model, vocab_size=400, max_position_embeddings=128, num_hidden_layers=1)
    trained_tokenizer().save(str(model / "tokenizer.json"))
    settings = {**MODEL, "parallel.executor": executor, "parallel.restart_workers": 2 * runs}
    llm = LLM(str(model), **settings)
    try:
        yield llm
    finally:
        llm.shutdown()


def in_workers(name: str, runs: int, folder: Path, chance: random.Random) -> Iterator[str]:
    """Yield the fault of each run in which a worker is killed while requests are open.

    The open requests may end with all tokens, or with an error behind the first ones.
    """
    executor = "ray" if name == "a Ray actor" else "processes"
    if executor == "ray":
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with engine(folder, executor, runs) as llm:

        def answers(most: int) -> list[Answer]:
            params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
            outputs = [each.outputs[0] for each in llm.generate(["a", "b", "c"], params)]
            return [(str(each.finish_reason), each.token_ids) for each in outputs]

        right = answers(3)
        begin = time.monotonic()
        whole = answers(48)
        longest = time.monotonic() - begin

        def ask(faults: list[str]) -> None:
            faults.append(fault_of_loss(lambda: answers(48), whole))

        done = 0
        while done < runs:
            faults: list[str] = []
            asking = threading.Thread(target=ask, args=(faults,))
            asking.start()
            time.sleep(chance.uniform(0, longest))
            if not asking.is_alive():
                continue
            os.kill(chance.choice(workers(llm)), signal.SIGKILL)
            done += 1
            asking.join(120)
            if asking.is_alive():
                yield "the requests of the lost worker do not end"
                return
            found = answers(3)
            if found != right:
                faults.append(f"the answers are {found}, were {right}")
            yield "; ".join(filter(None, faults))


def fault_of_loss(answer: Callable[[], list[Answer]], whole: list[Answer]) -> str:
    """Return the fault of requests during which a worker is lost; empty if there is none."""
    try:
        found = answer()
    except Exception as error:
        return f"the open requests raise {type(error).__name__}: {error}"
    for (reason, tokens), (usual, wanted) in zip(found, whole, strict=True):
        is_whole = (reason, tokens) == (usual, wanted)
        is_begun = reason == "error" and tokens == wanted[: len(tokens)]
        if not is_whole and not is_begun:
            return f"an open request ends with {reason} and {tokens}, was {usual} and {wanted}"
    return ""


def workers(llm: LLM) -> list[int]:
    """Return the process ids of the workers of an engine. Other engines may run on the machine."""
    links = llm.engine.core.executor.workers.links  # type: ignore[attr-defined]
    own = [link.process.pid for link in links if isinstance(link, LocalProcess)]
    if own:
        return own
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"ray::RayWorker" in each.read_bytes() and _is_below(int(each.parent.name)):
                found.append(int(each.parent.name))
    return found


def _is_below(pid: int) -> bool:
    """Return True if a process is a descendant of this one."""
    while pid > 1:
        if pid == os.getpid():
            return True
        # The name in parentheses may have spaces.
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def scene(name: str, runs: int, seed: int) -> dict[str, Any]:
    """Run a scene in this process."""
    chance = random.Random(seed)  # noqa: S311
    folder = Path(tempfile.mkdtemp(prefix="interruptions-"))
    os.environ["XDG_STATE_HOME"] = str(folder / "states")
    runners = {
        "a worker": in_workers,
        "a Ray actor": in_workers,
        "a process of a handover": in_handovers,
    }
    run = runners.get(name, in_stores)
    start = time.monotonic()
    try:
        faults = list(run(name, runs, folder, chance))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [fault for fault in faults if fault]
    return {
        "scene": name,
        "seed": seed,
        "runs": len(faults),
        "correct": len(faults) - len(wrong),
        "faults": sorted(set(wrong))[:5],
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--scenes", nargs="*", default=[*SHARES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        print(json.dumps(scene(asked.alone, asked.runs, asked.seed)))
        return 0
    run = this_run()
    rows: list[dict[str, Any]] = []
    share = sum(SHARES[name] for name in asked.scenes)
    for name in asked.scenes:
        runs = max(1, round(asked.runs * SHARES[name] / share))
        given = ["--alone", name, "--runs", str(runs), "--seed", str(asked.seed)]
        command = [sys.executable, __file__, *given]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        # Rows of former runs may stand beside this one.
        rows.append(json.loads(told.splitlines()[-1]) | {"commit": run["commit"]})
        print(f"{name}: {rows[-1]['correct']} of {rows[-1]['runs']} correct", *rows[-1]["faults"])
        # After each scene, as all of them may take an hour.
        if asked.json:
            keep(asked.json, rows[-1], run)
    correct, runs = (sum(row[key] for row in rows) for key in ("correct", "runs"))
    print(f"{correct} of {runs} runs ended correctly, with the seed {asked.seed}")
    return 0 if correct == runs else 1


def keep(path: Path, row: dict[str, Any], run: dict[str, str]) -> None:
    """Write the row of a scene into a file, and leave the rows of other scenes and seeds there."""
    rows = json.loads(path.read_text())["scenes"] if path.exists() else []
    known = {(each["scene"], each["seed"]): each for each in [*rows, row]}
    order = [*SHARES]
    scenes = sorted(known.values(), key=lambda each: (order.index(each["scene"]), each["seed"]))
    table = {"machine": machine(), **run, "scenes": scenes}
    path.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
