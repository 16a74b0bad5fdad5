"""The first token after a long prompt: computed, and read from a folder that another process has filled.

Two processes have a model each, and one folder. In each round one of them computes a new prompt, and the other one is
asked the same then. For rows "after a start", both processes are new in each round. In the others they go on, and all
blocks of their caches have been used before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from timing import machine

LEAST = 15.0
"""The fine ratio."""

BLOCK = 32

STARTED, RUNNING = "after a start", "in processes that run"

_MODEL: list[Any] = []


def open_model(name: str, dtype: str, folder: str, used_blocks: int | None) -> None:
    """Load the model of this process, and write to all blocks if their number is given."""
    from opgraft import LLM, SamplingParams

    settings: dict[str, Any] = {
        "cache.store": folder,
        "cache.block_size": BLOCK,
        "load.progress": False,
    }
    if used_blocks is not None:
        settings["cache.num_blocks"] = used_blocks
        settings["model.max_model_len"] = used_blocks * BLOCK
    _MODEL[:] = [LLM(name, dtype=dtype, **settings)]
    # The first answer of a process makes what later ones use.
    length = 100 if used_blocks is None else (used_blocks - 1) * BLOCK
    _MODEL[0].generate([[3] * length], SamplingParams(max_tokens=2, temperature=0))


def ask(prompt: list[int]) -> tuple[float, list[int]]:
    """Return the seconds until the first token, and the token."""
    from opgraft import SamplingParams

    begin = time.perf_counter()
    (answer,) = _MODEL[0].generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - begin, answer.outputs[0].token_ids


def measured(name: str, dtype: str, when: str, length: int, rounds: int) -> dict[str, Any]:
    """Return the medians of both processes, and of their ratio in each round."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        used_blocks = length // BLOCK + 2 if when == RUNNING else None
        given = (name, dtype, folder, used_blocks)
        turns = range(rounds)
        groups = [turns] if when == RUNNING else [[turn] for turn in turns]
        for group in groups:
            pairs += pairs_of_processes(given, folder, length, group)
    ratios = [computed / found for computed, found in pairs]
    return {
        "dtype": dtype,
        "when": when,
        "tokens": length,
        "computed_seconds": statistics.median(computed for computed, _ in pairs),
        "stored_seconds": statistics.median(found for _, found in pairs),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "rounds": rounds,
    }


def pairs_of_processes(
    given: tuple[Any, ...], folder: str, length: int, turns: Iterable[int]
) -> list[tuple[float, float]]:
    """Return the seconds of computing and of reading a prompt, for each turn."""
    context = multiprocessing.get_context("spawn")
    pairs = []
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(ProcessPoolExecutor(1, context, open_model, given))
            for _ in range(2)
        )
        for turn in turns:
            prompt = random.Random(turn).choices(range(100, 40_000), k=length)  # noqa: S311
            # Both are awake, and the second one has nothing of this prompt.
            second.submit(ask, prompt[:1]).result()
            there = entries(folder)
            computed, _ = first.submit(ask, prompt).result()
            while entries(folder) < there + (length - 1) // BLOCK:
                time.sleep(0.05)
            # With the beginning in its cache, a process computes as the other one does with that
            # from the folder. A whole prompt is computed in other batches, and rounded in others.
            _, token = first.submit(ask, prompt).result()
            found, same = second.submit(ask, prompt).result()
            if same != token:
                raise RuntimeError(
                    f"the token is {token} from the cache, and {same} from the store"
                )
            pairs.append((computed, found))
    return pairs


def entries(folder: str) -> int:
    return sum(each.is_file() for each in Path(folder).rglob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a folder of blocks gains.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    rows = []
    for dtype, when in product(given.dtypes, (STARTED, RUNNING)):
        row = measured(given.model, dtype, when, given.tokens, given.rounds)
        rows.append(row)
        print(
            f"{dtype}, {when}, {given.tokens} tokens: computed {row['computed_seconds']:.3f} s, from the "
            f"folder {row['stored_seconds']:.3f} s, {row['ratio']:.1f} times as fast "
            f"(wanted {LEAST:g}), median of {given.rounds} rounds"
        )
    if given.json:
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    raise SystemExit(any(row["ratio"] < LEAST for row in rows))


if __name__ == "__main__":
    main()
