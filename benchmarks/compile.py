"""Gains and costs of compilation: a Llama of 12 layers by ``opgraft.compile``, beside transformers, torch.compile and
the same grafted model uncompiled, and the engine's step.

Each side is a process of its own; the sides take turns. Ratios are medians over rounds, of seconds on the clock or,
with ``--cpu-time`` for a machine that has other work, of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from clocks import Seconds
from compile_sides import (
    KERNELS,
    PLAIN,
    QUANTIZED,
    SIDES,
    STOCK,
    TINY,
    Process,
    Shape,
    in_turns,
    prepared,
    processes,
    tokens,
    unplanned,
)
from engine_rows import Finding, Roof, print_findings
from engine_rows import Shape as Work
from machine_limits import speeds
from parallel_ranks import Ranks, decode, left_out, load
from timing import machine, this_run

MOST = {
    "float32": {1: 0.40, 4: 0.36, 16: 0.40, 64: 0.44},
    "bfloat16": {1: 0.35, 4: 0.45, 16: 0.55, 64: 0.75},
}
"""Dtype and batch → the highest fine ratio of a compiled model's time to that of transformers."""

COMPILED = {"O1": "O0", "O2": "O0", "kernels O1": "kernels O0", "kernels O2": "kernels O0"}
"""Compiled side → the same model uncompiled."""

CALLS = {1: 12, 4: 10, 16: 8, 64: 4}
"""Batch → calls of a round."""

FUSIONS = {
    **dict.fromkeys(("joint_linears", "gated_product", "add_rms_norm"), "Llama"),
    "qk_norm_rope": "Qwen3",
    **dict.fromkeys(
        ("rms_norm_quant_fp8", "silu_and_mul_quant_fp8", "attention_quant_fp8"), QUANTIZED
    ),
}
"""Pass → the family of models in which it finds something."""

EXCHANGES = ("all_reduce_rms_norm", "sequence_parallelism", "async_tensor_parallelism")
"""Passes over what ranks exchange."""

EXCHANGED_ROWS = 256

SIZES = 50
LEVELS = (0, 1, 2, 3)
"""Of the engine."""

ENGINE_BATCHES = (1, 32)
ANSWER = 24
"""Tokens of an answer of the engine."""


def steady(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare calls of the large model: with transformers', and with those of the same model uncompiled."""
    for dtype in arguments.dtypes:
        work = work_of(replace(arguments.shape, dtype=dtype))
        limits = speeds(work.weights, getattr(torch, dtype))
        with processes(arguments.sides, replace(arguments.shape, dtype=dtype)) as started:
            for batch, most in MOST[dtype].items():
                found = in_turns(started, batch, CALLS[batch], arguments.rounds)
                least = least_of(work, batch, [limits() for _ in range(arguments.rounds)])
                of = f"{dtype}, batch {batch}"
                for side in found.keys() - {PLAIN}:
                    fine = most if side == "kernels O2" else None
                    yield over(
                        f"{side} / {PLAIN}, {of}", found[side], found[PLAIN], arguments, fine, least
                    )
                for side, uncompiled in COMPILED.items():
                    if {side, uncompiled} <= found.keys():
                        yield over(
                            f"{side} / {uncompiled}, {of}",
                            found[side],
                            found[uncompiled],
                            arguments,
                            1.0,
                        )


def work_of(shape: Shape) -> Work:
    """Return the weights of a Llama that a call multiplies by each of its tokens."""
    layers = shape.layers * shape.hidden * (4 * shape.hidden + 3 * (shape.hidden * 43 // 16))
    head = shape.vocabulary * shape.hidden
    return Work(
        (layers + head) * getattr(torch, shape.dtype).itemsize, layers, head, cached=0, attention=0
    )


def least_of(work: Work, batch: int, limits: Sequence[Mapping[str, Seconds]]) -> Seconds:
    """Return the least seconds of a call, by the speeds of reading and of products that were measured beside it."""

    def median(speed: str, clock: str) -> float:
        return statistics.median(each[speed][clock] for each in limits)

    roofs = {
        clock: Roof(median("bytes_per", clock), median("products_per", clock))
        for clock in limits[0]["bytes_per"]
    }
    return {clock: roof.step(work, batch, batch, 0) for clock, roof in roofs.items()}


def calls(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare calls of a tiny model, which take as long as what is around its kernels.

    Each has one thread: to wake a second one, for attention, takes some processes as long as all else.
    """
    with processes(
        arguments.sides, replace(TINY, layers=arguments.shape.layers), threads=1
    ) as started:
        for batch in (1, 4):
            found = in_turns(started, batch, 40, arguments.rounds)
            for side in found.keys() - {STOCK}:
                most = 0.5 if side.endswith("O2") else None
                name = f"{side} / {STOCK}, a call of a tiny model by one thread, batch {batch}"
                yield over(name, found[side], found[STOCK], arguments, most)


def fusions(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare calls with each fusion and without it, where each op runs its kernel, and the bytes that they move."""
    for name, family in FUSIONS.items():
        for side in {"O1", "kernels O1"} & {*arguments.sides}:
            with ExitStack() as stack:
                started = {}
                for state in (True, False):
                    shape = replace(arguments.shape, family=family)
                    started[f"{state}"] = Process(side, shape, None, pass_config={name: state})
                    stack.callback(started[f"{state}"].close)
                for batch in (1, 16):
                    found = in_turns(started, batch, CALLS[batch], arguments.rounds)
                    yield over(
                        f"{name} on / off, {side}, batch {batch}",
                        found["True"],
                        found["False"],
                        arguments,
                    )
                yield moved(
                    f"{name} on / off, {side}, batch 16, bytes",
                    *(each.call(16, 0)["bytes"] for each in started.values()),
                )


def exchanges(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare calls of layers that two ranks share with each pass over collectives and without it."""
    from compile_models import shared

    shape = arguments.shape
    sizes = (shape.hidden, shape.hidden * 43 // 16, shape.layers, EXCHANGED_ROWS)
    for name in EXCHANGES:
        # Kernels of the plugin exchange by themselves, where nobody counts bytes.
        with patch.dict(os.environ, OPGRAFT_PLUGINS=""), Ranks(2) as ranks:
            (times, exchanged, traffic), _ = ranks.run(shared, sizes, name, arguments.rounds)
        of = f"{name} on / off, two ranks, {EXCHANGED_ROWS} rows"
        ours, theirs = times
        yield over(of, ours, theirs, argparse.Namespace(cpu_time=False))
        yield moved(f"{of}, bytes sent", *exchanged)
        yield moved(f"{of}, bytes moved", *traffic)


def recompilations(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Count the graphs that a backend is given while a compiled model is called with every size of the batch."""
    import opgraft

    graphs: list[object] = []

    def counting(module: Any, example: object) -> Any:
        graphs.append(module)
        return module.forward

    shape = replace(TINY, layers=arguments.shape.layers)
    model = prepared(SIDES["O2"], shape)
    config = opgraft.CompilationConfig(level=2, backend="counting")
    given: dict[str, Any] = {"use_cache": False}
    known: Any = torch._dynamo.backends.registry
    # A name that is registered is so for good.
    with (
        patch.dict(known._BACKENDS),
        patch.dict(known._COMPILER_FNS),
    ):
        known.register_backend(counting, name="counting")
        run = opgraft.compile(model, config, args=(tokens(4, shape.vocabulary),), kwargs=given)
    largest = 0.0
    with torch.no_grad():
        for size in range(1, SIZES + 1):
            ids = tokens(size, shape.vocabulary)
            largest = max(
                largest, float((run(ids, **given).logits - model(ids, **given).logits).abs().max())
            )
    detail = f"graphs after the first, for the sizes 1 to {SIZES}"
    yield Finding("recompilations", len(graphs) - 1, detail, most=0)
    yield Finding(
        "largest difference of logits",
        largest,
        "from the model, for these sizes",
        most=1e-4,
    )


def starts(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare first outputs of processes that find no compiled code, once each, and of those that find it, in turns."""
    sides = (PLAIN, STOCK, "O0", "O1", "O2", "kernels O0", "kernels O2")
    with tempfile.TemporaryDirectory() as folder:
        # Inductor's commands quote no names.
        folders = {side: Path(folder) / side.replace(" ", "-") for side in sides}
        cold = {side: [_first(side, arguments.shape, folders[side])] for side in sides}
        rounds = [
            {side: _first(side, arguments.shape, folders[side]) for side in sides}
            for _ in range(arguments.rounds)
        ]
    warm = {side: [each[side] for each in rounds] for side in sides}
    for side, most in ((STOCK, None), ("O2", 0.03)):
        name = f"{side}, first output, warm / cold"
        yield over(name, warm[side], cold[side] * arguments.rounds, arguments, most)
    for side, uncompiled in (("O2", "O0"), ("kernels O2", "kernels O0")):
        yield over(f"{side}, warm first output / {PLAIN}", warm[side], warm[PLAIN], arguments, 1.5)
        yield over(
            f"{side}, warm first output / {uncompiled}", warm[side], warm[uncompiled], arguments
        )
    yield over(f"O2, warm first output / {STOCK}", warm["O2"], warm[STOCK], arguments)
    yield over(f"O2, cold first output / {STOCK}", cold["O2"], cold[STOCK], arguments, 1.0)
    yield over(f"O1, cold first output / {STOCK}", cold["O1"], cold[STOCK], arguments, 0.5)


def _first(side: str, shape: Shape, folder: Path) -> Seconds:
    kept: dict[str, Any] = (
        {"cache": True, "cache_folder": str(folder / "opgraft")} if side.endswith("O2") else {}
    )
    process = Process(side, shape, folder, **kept)
    process.close()
    return process.first


def engine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare starts of engines that compile and of those that do not, and their steps at each level."""
    with tempfile.TemporaryDirectory() as folder:
        for dtype in arguments.dtypes:
            yield warm_starts(arguments, dtype, folder)
            yield from steps(arguments, arguments.model, dtype, folder)
            without_a_plan = unplanned(Path(folder) / "unplanned")
            yield from steps(arguments, without_a_plan, dtype, folder, ", without a plan")
            with patch.dict(os.environ, OPGRAFT_PLUGINS=""):
                yield from steps(arguments, arguments.model, dtype, folder, f", without {KERNELS}")


def compiled(level: int, folder: str) -> dict[str, Any]:
    """Return the settings of an engine at this level. Generated code, of levels 2 and 3, is kept in the folder."""
    kept = {"cache": True, "cache_folder": folder} if level > 1 else {}
    return {"level": level, **kept}


def warm_starts(arguments: argparse.Namespace, dtype: str, folder: str) -> Finding:
    """Compare starts of engines at levels 0 and 2, which find their compiled code, in turns."""
    began: dict[int, list[Seconds]] = {0: [], 2: []}
    with Ranks(1) as filling:
        filling.run(started, arguments.model, dtype, compiled(2, folder))
    for turn in range(arguments.rounds):
        for level in in_turn(began, turn):
            with Ranks(1) as ranks:
                began[level] += ranks.run(started, arguments.model, dtype, compiled(level, folder))
    return later(f"warm start of the engine, -O2 minus -O0, {dtype}", began[2], began[0])


def steps(
    arguments: argparse.Namespace, model: str, dtype: str, folder: str, of: str = ""
) -> Iterator[Finding]:
    """Compare steps of engines of all levels, each in one thread.

    Where a plan computes all layers in one call, the bound leaves a compiler what the other parts of the model take.
    """
    with ExitStack() as stack:
        engines = {level: stack.enter_context(Ranks(1)) for level in LEVELS}
        for level, ranks in engines.items():
            ranks.run(started, model, dtype, compiled(level, folder))
        for batch in ENGINE_BATCHES:
            taken: dict[int, list[Seconds]] = {level: [] for level in LEVELS}
            for turn in range(arguments.rounds + 1):
                for level in in_turn(engines, turn):
                    seconds = engines[level].run(decode, batch, ANSWER)[0].seconds
                    taken[level].append({"seconds": seconds, "cpu_seconds": seconds})
            bound = None if of else engines[0].run(left_out, batch, ANSWER)[0]
            for level in LEVELS[1:]:
                name = f"the engine's step{of}, -O{level} / -O0, {dtype}, batch {batch}"
                most = 0.95 if level == 2 else None
                clock = argparse.Namespace(cpu_time=False)
                found = over(name, taken[level][1:], taken[0][1:], clock, most)
                yield replace(found, bound=bound)


def in_turn(sides: Iterable[int], turn: int) -> list[int]:
    """Return the sides in their order, and every second time in the other one."""
    return list(sides)[:: 1 if turn % 2 else -1]


def started(state: dict[str, Any], model: str, dtype: str, settings: Mapping[str, Any]) -> Seconds:
    """Make an engine in a rank, and say what that took."""
    from clocks import taken
    from compile_sides import settle

    found = taken(lambda: load(state, model, dtype, settings))
    settle()
    return found


def later(name: str, ours: Sequence[Seconds], theirs: Sequence[Seconds]) -> Finding:
    """Return the median over rounds of the seconds by which one side takes longer than another."""
    pairs = [(a["seconds"], b["seconds"]) for a, b in zip(ours, theirs, strict=True)]
    mine, other = map(statistics.median, zip(*pairs, strict=True))
    detail = f"seconds, {mine:.2f} over {other:.2f}, {len(pairs)} rounds"
    return Finding(name, statistics.median(a - b for a, b in pairs), detail, most=0.3)


def over(
    name: str,
    ours: Sequence[Seconds],
    theirs: Sequence[Seconds],
    arguments: argparse.Namespace,
    most: float | None = None,
    least: Seconds | None = None,
) -> Finding:
    """Return the median over rounds of the ratio of two sides; ``least``: what ours may take on this machine."""
    clock = "cpu_seconds" if arguments.cpu_time else "seconds"
    pairs = [(a[clock], b[clock]) for a, b in zip(ours, theirs, strict=True)]
    mine, other = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    detail = f"{mine:,.2f} over {other:,.2f} ms{' of CPU time' if arguments.cpu_time else ''}, {len(pairs)} rounds"
    bound = None if least is None else statistics.median(least[clock] / b for _, b in pairs)
    return Finding(name, statistics.median(a / b for a, b in pairs), detail, most=most, bound=bound)


def moved(name: str, ours: float, theirs: float) -> Finding:
    """Return the ratio of the bytes of two sides."""
    return Finding(name, ours / theirs, f"{ours / 1e6:,.2f} over {theirs / 1e6:,.2f} MB")


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Finding]]] = {
    "steady": steady,
    "calls": calls,
    "fusions": fusions,
    "exchanges": exchanges,
    "recompilations": recompilations,
    "starts": starts,
    "engine": engine,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What compilation gains and costs.")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument(
        "--rows", nargs="*", choices=PARTS, default=list(PARTS), help="these parts only"
    )
    parser.add_argument(
        "--sides", nargs="*", choices=SIDES, default=list(SIDES), help="these only, of calls"
    )
    parser.add_argument("--dtypes", nargs="*", choices=MOST, default=list(MOST), help="these only")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="compare CPU time, where other work runs beside this",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--model", default="smollm2", help="of the engine")
    arguments = parser.parse_args()
    arguments.shape = Shape(layers=arguments.layers)
    return arguments


def keep(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a file behind those that are there. Earlier rows of the same names go."""
    earlier = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    names = {row["name"] for row in rows}
    kept = [row for row in earlier if row["name"] not in names]
    path.write_text(json.dumps({"rows": [*kept, *rows]}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    arguments, findings = parsed(), list[Finding]()
    run = {**this_run(), "machine": machine()}
    for part in arguments.rows:
        found = list(PARTS[part](arguments))
        print(f"measured: {part}", file=sys.stderr)
        findings += found
        if arguments.json:
            # After each part, as all of them take an hour.
            rows = [{**asdict(each), "verdict": each.verdict, **run} for each in found]
            keep(arguments.json, rows)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print_findings(findings)
    raise SystemExit(any(each.verdict == "missed" for each in findings))


if __name__ == "__main__":
    main()
