"""Gains of grafting on whole models: plain transformers, grafted on the bare CPU platform, grafted with kernels.

Each side is a process of its own, which loads the model once and then runs it whenever it is told to; the sides take
turns, so that all meet the same clock speed and the same neighbours. The encoder is the real MiniLM on 512 sentences,
the causal model a Llama-shaped one with random weights that generates 64 tokens for one prompt. A process beside them
measures in the same turns what is possible at best: the Python of transformers around grafted ops that do nothing,
which no kernel can spare, and each linear layer's weight read from memory or its products, whichever takes longer.

With ``--json FILE`` the figures of every round go to a file, from which ``tools/figures.py`` draws charts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from timing import Row, machine, print_table
from torch import nn
from torch.utils import mkldnn

sys.path.append(str(Path(__file__).parent / "peers"))
from machine_limits import speeds, taken  # a script's folder is not a package

ROUNDS = 7
BATCH = 32
SENTENCES = Path(__file__).parents[1] / "examples" / "sentences.txt"
PLUGIN = "cpu_kernels"


@dataclass(frozen=True)
class Side:
    """The way in which one process runs the model.

    Attributes:
        graft: whether the model is grafted.
        freeze: whether its weights are declared frozen after that.
        compile: whether it goes through ``torch.compile``.
        precision: as of ``torch.set_float32_matmul_precision``; torch's own linear on CPUs takes no notice of it.
        environment: variables beside those of this process.
        bound: whether the process answers with the least seconds that linear layers could take.
    """

    graft: bool = False
    freeze: bool = True
    compile: bool = False
    precision: str = "highest"
    environment: Mapping[str, str] | None = None
    bound: bool = False


POSSIBLE = "possible"
SIDES = {
    "plain": Side(),
    POSSIBLE: Side(graft=True, bound=True, environment={"OPGRAFT_PLUGINS": PLUGIN}),
    "plain, high": Side(precision="high"),
    "compiled": Side(compile=True),
    "bare": Side(graft=True, environment={"OPGRAFT_PLUGINS": ""}),
    "bare, not frozen": Side(graft=True, freeze=False, environment={"OPGRAFT_PLUGINS": ""}),
    "kernels": Side(graft=True, environment={"OPGRAFT_PLUGINS": PLUGIN}),
    "kernels, memory kept": Side(
        graft=True, environment={"OPGRAFT_PLUGINS": PLUGIN, "OPGRAFT_CPU_KEEP_MEMORY": "1"}
    ),
    "kernels, high": Side(graft=True, precision="high", environment={"OPGRAFT_PLUGINS": PLUGIN}),
    "kernels, high, memory kept": Side(
        graft=True,
        precision="high",
        environment={"OPGRAFT_PLUGINS": PLUGIN, "OPGRAFT_CPU_KEEP_MEMORY": "1"},
    ),
}

# model and dtype: side → the highest fine ratio of its time to plain's
LIMITS: dict[tuple[str, str], dict[str, float | None]] = {
    ("encoder", "float32"): {
        "kernels": 0.50,
        "kernels, memory kept": 0.43,
        "kernels, high": None,
        "kernels, high, memory kept": None,
        "bare": None,
        "bare, not frozen": None,
        "compiled": None,
        "plain, high": None,
    },
    ("causal", "float32"): {
        "kernels": 0.45,
        "bare": None,
        "bare, not frozen": None,
        "compiled": None,
    },
    ("causal", "bfloat16"): {
        "kernels": 0.55,
        "bare": None,
        "bare, not frozen": None,
        "compiled": None,
    },
}
Run = Callable[[], torch.Tensor]
# From as many on, oneDNN's product of so many rows is measured.
MANY_ROWS = 128
LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 5e-2}


def encoder(dtype: torch.dtype, side: Side) -> tuple[nn.Module, Run]:
    from opgraft import freeze, graft
    from opgraft.models import find_checkpoint
    from opgraft.models.pooling import pooled
    from transformers import AutoModel, AutoTokenizer

    lines = [line for line in SENTENCES.read_text(encoding="utf-8").splitlines() if line]
    texts = (lines * (512 // len(lines) + 1))[:512]
    folder = find_checkpoint("minilm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    if side.graft:
        graft(model)
    if side.graft and side.freeze:
        freeze(model)
    if side.compile:
        model.forward = torch.compile(model.forward)
    options: dict[str, Any] = {
        "padding": True,
        "truncation": True,
        "max_length": 256,
        "return_tensors": "pt",
    }

    @torch.inference_mode()
    def embed(batch: list[int]) -> torch.Tensor:
        tokens = tokenizer([texts[index] for index in batch], **options)
        states = model(**tokens).last_hidden_state
        return torch.nn.functional.normalize(
            pooled(states, tokens["attention_mask"], ("mean",)), dim=-1
        )

    # Texts of like length share a batch, which then has little padding.
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    return model, lambda: torch.cat([embed(batch) for batch in batches])


def causal(dtype: torch.dtype, side: Side) -> tuple[nn.Module, Run]:
    import transformers
    from opgraft import freeze, graft

    config = transformers.LlamaConfig(
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1376,
        vocab_size=32_000,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(dtype).eval()
    if side.graft:
        graft(model)
    if side.graft and side.freeze:
        freeze(model)
    prompt = torch.arange(1, 17)[None]
    options: dict[str, Any] = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}

    # In half types a near tie may be decided the other way, and what follows has nothing to be compared with.
    compared = 64 if dtype == torch.float32 else 1

    @torch.inference_mode()
    def run() -> torch.Tensor:
        result = model.generate(prompt, **options, output_logits=True, return_dict_in_generate=True)
        return torch.cat(result.logits[:compared]).float()

    return model, run


MODELS = {"encoder": encoder, "causal": causal}


def worker(model: str, dtype: str, side: str, output: str) -> None:
    """Answer each line on stdin with the seconds of one run; at the end the numbers of the last go to a file."""
    torch.set_float32_matmul_precision(SIDES[side].precision)
    network, run = MODELS[model](getattr(torch, dtype), SIDES[side])
    numbers = run()

    def seconds() -> float:
        nonlocal numbers
        start = time.perf_counter()
        numbers = run()
        return time.perf_counter() - start

    answer = _bound(network, run, getattr(torch, dtype)) if SIDES[side].bound else seconds
    print("ready", flush=True)
    for _ in sys.stdin:
        print(answer(), flush=True)
    torch.save(numbers, output)


def _bound(model: nn.Module, run: Run, dtype: torch.dtype) -> Callable[[], float]:
    """Return what measures this machine, and computes the least seconds that a run could take.

    They are those of transformers' Python around the ops of a grafted model, and of the linear layers: each takes as
    long as its weight takes to be read from memory, or its products to be computed, whichever is longer. Products of
    many rows are measured as they are, those of few at the speed of a large matrix, as a call would take longer than
    they do. Attention, norms and all other ops count as nothing.
    """
    calls, around = _linear_calls(run), _without(_outermost_ops(model), run)
    measure = speeds(sum(layer.weight.nbytes for layer in {layer for _, layer in calls}), dtype)
    many = {(rows, layer.weight.shape) for rows, layer in calls if rows >= MANY_ROWS}
    products = {shape: _product(*shape, dtype) for shape in many}

    def least() -> float:
        found = measure()
        reading, computing = (found[name]["seconds"] for name in ("bytes_per", "products_per"))
        measured = {shape: taken(product, 5)["seconds"] for shape, product in products.items()}

        def of(rows: int, weight: torch.Tensor) -> float:
            computed: float = measured.get((rows, weight.shape), rows * weight.numel() / computing)
            return max(weight.nbytes / reading, computed)

        outside: float = taken(around, 1)["seconds"]
        return sum((of(rows, layer.weight) for rows, layer in calls), outside)

    return least


def _linear_calls(run: Run) -> list[tuple[int, nn.Linear]]:
    """Return the linear layers that a run calls, in order, each with the number of rows of its input."""
    calls: list[tuple[int, nn.Linear]] = []

    def note(layer: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        if isinstance(layer, nn.Linear):
            calls.append((arguments[0].numel() // layer.in_features, layer))

    with nn.modules.module.register_module_forward_pre_hook(note):
        run()
    return calls


def _outermost_ops(module: nn.Module) -> list[nn.Module]:
    """Return the ops of a grafted model, without those that belong to others."""
    from opgraft import CustomOp

    if isinstance(module, CustomOp):
        return [module]
    return [op for child in module.children() for op in _outermost_ops(child)]


def _without(ops: Sequence[nn.Module], run: Run) -> Callable[[], None]:
    """Return the run in which modules answer at once, with what they gave first for an input of the same shape."""
    known: dict[tuple[object, torch.Size], object] = {}

    def remembering(compute: Callable[..., object]) -> Callable[..., object]:
        def answer(x: torch.Tensor, *arguments: object, **options: object) -> object:
            if (compute, x.shape) not in known:
                known[compute, x.shape] = compute(x, *arguments, **options)
            return known[compute, x.shape]

        return answer

    methods = [
        (op, name) for op in ops for name in ("forward", "rotate_heads") if hasattr(op, name)
    ]
    answers = [(op, name, remembering(getattr(op, name))) for op, name in methods]

    def around() -> None:
        for op, name, answer in answers:
            setattr(op, name, answer)
        run()
        for op, name, _ in answers:
            delattr(op, name)

    return around


@torch.inference_mode()
def _product(rows: int, weight: torch.Size, dtype: torch.dtype) -> Callable[[], object]:
    to_mkldnn: Any = mkldnn.to_mkldnn  # which has no types
    layer = to_mkldnn(nn.Linear(weight[1], weight[0], bias=False, dtype=dtype).eval(), dtype)
    x = torch.randn(rows, weight[1], dtype=dtype).to_mkldnn()
    return lambda: layer(x)


@dataclass(frozen=True)
class Comparison:
    """One model in one dtype, run by all sides in turn.

    Attributes:
        seconds: of each round, by side.
        numbers: what each side computed in its last round.
    """

    model: str
    dtype: str
    seconds: Mapping[str, list[float]]
    numbers: Mapping[str, torch.Tensor]

    def ratios(self, side: str, baseline: str = "plain") -> list[float]:
        """Return the time of ``side`` over that of ``baseline``, round by round."""
        return [a / b for a, b in zip(self.seconds[side], self.seconds[baseline], strict=True)]

    def rows(self) -> Iterator[Row]:
        """Yield the measured values of every side but plain, with their limits."""
        for side, limit in LIMITS[self.model, self.dtype].items():
            name = f"{self.model} {self.dtype}, {side}"
            medians = [statistics.median(self.seconds[each]) for each in (side, "plain")]
            detail = f"{medians[0]:.3g} s over {medians[1]:.3g} s, {ROUNDS} rounds"
            measured, possible = (
                round(statistics.median(self.ratios(each)), 4) for each in (side, POSSIBLE)
            )
            yield Row(
                f"{name} / plain", measured, limit, detail, None if limit is None else possible
            )
            difference = (self.numbers[side] - self.numbers["plain"]).abs().max().item()
            yield Row(
                f"{name}: largest difference",
                difference,
                LARGEST_DIFFERENCE[self.dtype],
                "from plain",
            )
            if "compiled" in self.seconds and side.startswith("kernels"):
                over_compiled = statistics.median(self.ratios(side, "compiled"))
                yield Row(
                    f"{name} / compiled",
                    round(over_compiled, 4),
                    1.0,
                    "torch.compile of the plain model",
                )

    def runs(self) -> Iterator[dict[str, object]]:
        """Yield for JSON, per side, the seconds of each round, and its speed over plain's: median and spread."""
        for side, seconds in self.seconds.items():
            speeds = [1 / ratio for ratio in self.ratios(side)]
            yield {
                "model": self.model,
                "dtype": self.dtype,
                "side": side,
                "seconds": [round(value, 4) for value in seconds],
                "speed": {
                    "median": round(statistics.median(speeds), 4),
                    "lowest": round(min(speeds), 4),
                    "highest": round(max(speeds), 4),
                },
            }


def compare(model: str, dtype: str) -> Comparison:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for index, side in enumerate(("plain", POSSIBLE, *LIMITS[model, dtype])):
            processes[side] = stack.enter_context(
                _started(model, dtype, side, str(folder / f"{index}.pt"))
            )
        seconds: dict[str, list[float]] = {side: [] for side in processes}
        for turn in range(ROUNDS):
            for side in list(processes)[:: 1 if turn % 2 == 0 else -1]:
                seconds[side].append(float(_ask(processes[side])))
        for process in processes.values():
            process.communicate()
        numbers = {side: torch.load(folder / f"{index}.pt") for index, side in enumerate(processes)}
    return Comparison(model, dtype, seconds, numbers)


def _started(model: str, dtype: str, side: str, output: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(SIDES[side].environment or {})}
    arguments = [sys.executable, __file__, "--worker", model, dtype, side, output]
    process = subprocess.Popen(
        arguments, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    if _line(process) != "ready":
        raise RuntimeError(
            f"the process for {model}, {side} did not get ready: see its messages above"
        )
    return process


def _ask(process: subprocess.Popen[str]) -> str:
    if process.stdin is not None:
        process.stdin.write("\n")
        process.stdin.flush()
    return _line(process)


def _line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip() if process.stdout else ""


def write_json(file: Path, comparisons: list[Comparison]) -> None:
    """Write what was measured, when, where and with which versions."""
    versions = {name: version(name) for name in ("opgraft", "transformers")}
    data = {
        "schema": 1,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": {**machine(), **versions, "threads": str(torch.get_num_threads())},
        "runs": [run for comparison in comparisons for run in comparison.runs()],
    }
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="What grafting gains on whole models.")
    parser.add_argument("--json", type=Path, help="a file for the figures of every round")
    arguments = parser.parse_args()
    comparisons = [compare(model, dtype) for model, dtype in LIMITS]
    if arguments.json:
        write_json(arguments.json, comparisons)
    rows = [row for comparison in comparisons for row in comparison.rows()]
    print_table(rows)
    raise SystemExit(0 if all(row.ok for row in rows) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
