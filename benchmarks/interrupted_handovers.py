"""The scenes of ``interruptions.py`` with a second process for long prompts.

Both workers start from an interpreter that has torch imported, as the tests start them. What is killed is the process
of the worker.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import opgraft
from opgraft import LLM, SamplingParams
from opgraft.engine.workers.process_executor import LocalProcess
from support.built_kernels import built
from support.random_decoders import OF_CPU_KERNELS, written
from support.warm import interpreter

Answer = tuple[str, list[int]]
"""The reason for the end of a request, and its tokens."""

Check = Callable[[], None]

LEAST = 64
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "model.max_model_len": 256,
    "model.batch_invariant": True,
    "cache.block_size": 16,
    # Room for the prompts of a run. Those of other runs are computed again.
    "cache.num_blocks": 48,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "load.progress": False,
    "parallel.executor": "processes",
}
SHAPE = {**OF_CPU_KERNELS, "num_hidden_layers": 2, "max_position_embeddings": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [random.Random(seed).choices(range(3, 400), k=130 + seed) for seed in range(24)]  # noqa: S311
SHORT = [5, 6, 7, 8]


def prepared(folder: Path) -> Path:
    """Write a model, and let all later processes find the kernels."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(built(folder / "build")))
    opgraft.reset()
    sys.executable = interpreter.warm_interpreter()
    model = folder / "llama"
    written("Llama", model, **SHAPE)
    return model


@contextmanager
def opened(model: Path, **settings: Any) -> Iterator[LLM]:
    llm = LLM(str(model), **SETTINGS, **settings)
    try:
        yield llm
    finally:
        llm.shutdown()


def answers(llm: LLM, prompts: Sequence[list[int]]) -> list[Answer]:
    outputs = [each.outputs[0] for each in llm.generate([*prompts, SHORT], GREEDY, progress=False)]
    return [(str(each.finish_reason), each.token_ids) for each in outputs]


def processes(executor: Any) -> list[int]:
    """Return the ids of the processes of an executor; none during a restart."""
    found = []
    for link in executor.workers.links:
        if isinstance(link, LocalProcess) and link.process.poll() is None:
            with suppress(OSError):
                found.append(interpreter.process_of(link.process.pid))
    return found


def in_handovers(name: str, runs: int, folder: Path, chance: random.Random) -> Iterator[str]:
    """Yield the fault of each run in which one of both processes is killed while prompts are handed over.

    If the second process is killed, all answers are whole. If the engine's own is, the open requests may end with an
    error behind their first tokens.
    """
    model = prepared(folder)
    with opened(model) as plain:
        right = {tuple(prompt): answers(plain, [prompt])[0] for prompt in PROMPTS}
        right[tuple(SHORT)] = answers(plain, [])[0]
    settings = {"handover.tokens": LEAST, "parallel.restart_workers": 4 * runs}
    with opened(model, **settings) as llm:
        engine: Any = llm.engine
        places = (engine.core.executor, engine.prefill.thread.engine.executor)
        answers(llm, PROMPTS[:1])
        begin = time.monotonic()
        answers(llm, PROMPTS[1:4])
        longest = time.monotonic() - begin
        done = 0
        while done < runs:
            # Otherwise, the second process is killed while it starts.
            if chance.random() < 0.9:
                until(lambda: not engine.prefill.fault())
            asked = chance.sample(PROMPTS, 3)
            found: list[Any] = []
            asking = threading.Thread(target=ask, args=(llm, asked, found))
            asking.start()
            time.sleep(chance.uniform(0, longest))
            place = chance.randrange(2)
            victims = processes(places[place])
            if not asking.is_alive() or not victims:
                asking.join(400)
                continue
            with suppress(ProcessLookupError):
                os.kill(victims[0], signal.SIGKILL)
            done += 1
            asking.join(400)
            if asking.is_alive():
                yield "the requests do not end"
                return
            expected = [right[tuple(prompt)] for prompt in (*asked, SHORT)]
            faults = [fault_of(found[0], expected, may_fail=place == 0)]
            later = chance.sample(PROMPTS, 2)
            wanted = [right[tuple(prompt)] for prompt in (*later, SHORT)]
            faults.append(fault_of(tried(llm, later), wanted))
            yield "; ".join(filter(None, faults))
        print(f"{name}: {llm.stats().counters.handovers}", file=sys.stderr)


def ask(llm: LLM, prompts: Sequence[list[int]], found: list[Any]) -> None:
    found.append(tried(llm, prompts))


def tried(llm: LLM, prompts: Sequence[list[int]]) -> list[Answer] | Exception:
    try:
        return answers(llm, prompts)
    except Exception as error:
        return error


def fault_of(
    found: list[Answer] | Exception, expected: list[Answer], may_fail: bool = False
) -> str:
    """Return the fault of answers; empty if there is none."""
    if isinstance(found, Exception):
        return f"requests raise {type(found).__name__}: {found}"
    for (reason, tokens), (usual, wanted) in zip(found, expected, strict=True):
        is_begun = may_fail and reason == "error" and tokens == wanted[: len(tokens)]
        if (reason, tokens) != (usual, wanted) and not is_begun:
            return f"a request ends with {reason} and {tokens}, was {usual} and {wanted}"
    return ""


def front_end(folder: Path) -> tuple[list[Callable[[], None]], Check]:
    """A process with both workers, which is killed at its start or while it answers."""
    model = prepared(folder)
    settings = {"handover.tokens": LEAST}
    told = folder / "workers"

    def work() -> None:
        with opened(model, **settings) as llm:
            engine: Any = llm.engine
            of_both = [engine.core.executor, engine.prefill.thread.engine.executor]
            told.write_text(" ".join(str(pid) for each in of_both for pid in processes(each)))
            while True:
                answers(llm, random.sample(PROMPTS, 3))

    def check() -> None:
        if told.exists():
            # The workers of a killed process end by themselves.
            left = [Path("/proc", pid) for pid in told.read_text().split()]
            until(lambda: not any(each.exists() for each in left))
            told.unlink()
        with opened(model) as plain:
            right = answers(plain, PROMPTS[:3])
        with opened(model, **settings) as llm:
            found = answers(llm, PROMPTS[:3])
            if found != right:
                raise RuntimeError(f"the answers are {found}, were {right}")
            own = Path(str(llm.engine.core.opgraft_config.cache.store))
            if any(map(is_abandoned, own.parent.glob("opgraft-handover-*"))):
                raise RuntimeError("the folder of a killed process is still there")

    return [work], check


def is_abandoned(folder: Path) -> bool:
    """Return True for a folder that no process has locked."""
    try:
        file = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def until(holds: Callable[[], bool], seconds: float = 400.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError("a process neither ends nor starts again")
        time.sleep(0.005)
