"""The sides of ``benchmarks/compile.py``: each a process that has one model in one way, and runs it when told to.

A line of JSON comes on stdin, with the ``batch`` and the ``number`` of calls; a line goes to stdout, with the seconds
of a call on the clock and of CPU time. Of no calls, it has the bytes that the operators of one read and write. The
first line out has the seconds from the model to its first output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clocks import Seconds, taken

sys.path += [str(Path(__file__).parent / "peers"), str(Path(__file__).parents[1] / "tests")]

KERNELS = "cpu_kernels"


@dataclass(frozen=True)
class Side:
    """The way in which one process runs a model.

    Attributes:
        level: of ``opgraft.compile``; ``None`` for a model that is not grafted.
        stock: whether it goes through ``torch.compile``, its batch marked as dynamic.
        plugins: that are loaded.
    """

    level: int | None = None
    stock: bool = False
    plugins: str = ""


PLAIN, STOCK = "transformers", "torch.compile"
SIDES = {
    PLAIN: Side(),
    STOCK: Side(stock=True),
    "O0": Side(0),
    "O1": Side(1),
    "O2": Side(2),
    "kernels O0": Side(0, plugins=KERNELS),
    "kernels O1": Side(1, plugins=KERNELS),
    "kernels O2": Side(2, plugins=KERNELS),
}


@dataclass(frozen=True)
class Shape:
    """A model of transformers, with random weights; a call has one token for each sequence of a batch."""

    layers: int = 12
    hidden: int = 512
    vocabulary: int = 32_000
    dtype: str = "float32"
    family: str = "Llama"


TINY = Shape(hidden=32, vocabulary=64)
"""A model whose calls take as long as it takes to get to its kernels, and to its 111 parameters."""


QUANTIZED = "layers that quantise"
"""The family of ``compile_models.Quantized``."""


def model_of(shape: Shape) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    dtype, intermediate = getattr(torch, shape.dtype), shape.hidden * 43 // 16
    if shape.family == QUANTIZED:
        from compile_models import Quantized

        return (
            Quantized(shape.vocabulary, shape.hidden, intermediate, shape.layers).to(dtype).eval()
        )
    heads = max(shape.hidden // 64, 2)
    config = getattr(transformers, f"{shape.family}Config")(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        vocab_size=shape.vocabulary,
        pad_token_id=0,
    )
    make: Any = getattr(transformers, f"{shape.family}ForCausalLM")
    model = make(config)
    return model.to(dtype).eval()


def unplanned(folder: Path) -> str:
    """Write a checkpoint with random weights, of the sizes of SmolLM2, whose layers no plan computes; return its path.

    They are Qwen3's, which norm each head.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    model: Any = transformers.Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def runner_of(model: Any, side: Side, **settings: Any) -> Callable[[Any], Any]:
    """Return the function that computes logits of ids ``[batch, 1]``; it may compile at its first call."""
    import torch

    if side.stock:
        run: Any = torch.compile(model)
        marked: Any = torch._dynamo.mark_dynamic
        first = iter([True])

        def stock(ids: Any) -> Any:
            if next(first, False):
                marked(ids, 0)
            return run(ids, use_cache=False).logits

        return stock
    if side.level is not None:
        import opgraft

        model = opgraft.compile(
            model,
            opgraft.CompilationConfig(level=side.level, **settings),
            args=(tokens(4, model.config.vocab_size),),
            kwargs={"use_cache": False},
        )
    return lambda ids: model(ids, use_cache=False).logits


def prepared(side: Side, shape: Shape) -> Any:
    """Return the model as a side has it before anything is compiled."""
    model = model_of(shape)
    if side.level is not None:
        import opgraft

        opgraft.graft(model)
        opgraft.freeze(model)
        settle()
    return model


def settle() -> None:
    """Wait for the thread that moves weights to huge pages, which is no part of what comes before or after."""
    for thread in threading.enumerate():
        if thread.name == "opgraft-huge-pages":
            thread.join()


def tokens(batch: int, vocabulary: int) -> Any:
    import torch

    return (torch.arange(batch)[:, None] * 7 + 1) % vocabulary


def worker(name: str, shape: Shape, settings: Mapping[str, Any]) -> None:
    """Tell the seconds to the first output, then those of each call that is asked for."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    side = SIDES[name]
    model = prepared(side, shape)
    runs: list[Callable[[Any], Any]] = []

    def first() -> None:
        runs.append(runner_of(model, side, **settings))
        runs[0](tokens(4, shape.vocabulary))

    with torch.no_grad():
        print(json.dumps(taken(first)), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            ids = tokens(asked["batch"], shape.vocabulary)
            runs[0](ids)
            if asked["number"]:
                found = taken(lambda ids=ids: runs[0](ids), asked["number"])  # type: ignore[misc]
            else:
                from support.traffic import traffic_of

                found = {"bytes": traffic_of(runs[0], ids)}
            print(json.dumps(found), file=answers)


class Process:
    """A running side.

    Attributes:
        first: what its first output took.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        folder: Path | None,
        *,
        threads: int | None = None,
        **settings: Any,
    ) -> None:
        self.name = name
        used = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        caches = {} if folder is None else {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        # In the process itself, whose CPU time is told.
        fixed = {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._process = subprocess.Popen(  # our own script
            [sys.executable, __file__, name, json.dumps(asdict(shape)), json.dumps(settings)],
            env={**os.environ, **fixed, **caches, **used, "OPGRAFT_PLUGINS": SIDES[name].plugins},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.first: Seconds = self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} ended: see its messages above")
        return json.loads(line)

    def call(self, batch: int, number: int) -> Seconds:
        """Return what one of so many calls takes; of none, the bytes that one would read and write."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"batch": batch, "number": number}) + "\n")
            self._process.stdin.flush()
        found: Seconds = self._answer()
        return found

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def processes(
    names: Sequence[str], shape: Shape, threads: int | None = None
) -> Iterator[dict[str, Process]]:
    """Start sides that take turns, each with as many threads as torch takes, if not said otherwise."""
    with ExitStack() as stack:
        started = {}
        for name in names:
            started[name] = Process(name, shape, None, threads=threads)
            stack.callback(started[name].close)
        yield started


def in_turns(
    started: Mapping[str, Process], batch: int, number: int, rounds: int
) -> dict[str, list[Seconds]]:
    """Return what each side took in each round, in which they take turns."""
    found: dict[str, list[Seconds]] = {name: [] for name in started}
    for turn in range(rounds):
        for name in list(started)[:: 1 if turn % 2 else -1]:
            found[name].append(started[name].call(batch, number))
    return found


if __name__ == "__main__":
    worker(sys.argv[1], Shape(**json.loads(sys.argv[2])), json.loads(sys.argv[3]))
