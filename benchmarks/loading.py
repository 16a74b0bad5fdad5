"""Measure the memory that loading takes on top of the weights, and that of a rank of two: ``make bench-loading``.

Each loading runs in a process of its own. Counted is the memory that a process has to itself (RssAnon) and that of the
files it has mapped (RssFile), sampled every millisecond, less what it had before the model was made; the weights are
what the checkpoint's tensors take in the model's dtype.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig
from opgraft.distributed import init_distributed
from opgraft.models import load_model, model_class, open_weights, read_config
from opgraft.ops import Linear

LIMIT = 1.1
"""The peak of loading, of the weights."""
SHARE = 0.56
"""The peak of a rank of two, of the peak of one."""
CASES = {
    "smollm2 in bfloat16": ("smollm2", "bfloat16"),
    "smollm2 in float32": ("smollm2", "float32"),
    "safetensors in bfloat16": ("", "bfloat16"),
    "safetensors in float32": ("", "float32"),
}


def resident() -> int:
    """Return the bytes of memory of this process, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssFile"))
    )


class Peak(threading.Thread):
    """The largest ``resident()`` until ``done`` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.done = resident(), threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.001):
            self.bytes = max(self.bytes, resident())


def measure(name: str, dtype: str, rank: int, ranks: int, store: str) -> dict[str, float]:
    """Load a checkpoint in this process, whose libraries are imported before the figures."""
    if ranks > 1:
        init_distributed(tensor=ranks, rank=rank, init_method=store)
    weights = open_weights(name)
    config = OpgraftConfig(
        model=ModelConfig(name=name, dtype=dtype), load=LoadConfig(progress=False)
    )
    # Its memory is never touched.
    model_class(read_config(weights).architectures)(opgraft_config=config)
    warm_up(weights.tensors, getattr(torch, dtype))
    before = resident()
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    model = load_model(config)
    seconds = time.perf_counter() - start
    peak.done.set()
    del model  # which lived until the peak was known
    held = (
        sum(tensor.numel() for tensor in weights.tensors.values()) * getattr(torch, dtype).itemsize
    )
    return {"weights": held, "peak": peak.bytes - before, "seconds": seconds}


def warm_up(tensors: object, dtype: torch.dtype) -> None:
    """Read a part and compute a layer, so that libraries and pools of threads are there before the figures."""
    for name in list(tensors)[:3]:  # type: ignore[call-overload]
        tensor = tensors[name]  # type: ignore[index]
        torch.empty(8, *tensor.shape[1:]).copy_(tensor[:8])
    with torch.inference_mode():
        Linear(64, 64, dtype=dtype)(torch.zeros(1, 64, dtype=dtype))


def random_llama(folder: Path) -> None:
    """Save a Llama whose heads two ranks can share."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "vocab_size": 32000,
    }
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def load(name: str, dtype: str, ranks: int) -> list[dict[str, float]]:
    """Load on so many ranks; return the figures of each."""
    with tempfile.TemporaryDirectory() as folder:
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--child",
                    name,
                    dtype,
                    str(rank),
                    str(ranks),
                    f"file://{folder}/store",
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"loading {name} on {ranks} ranks failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=5)
    child = parser.parse_args().child
    if child:
        name, dtype, rank, ranks, store = child
        print(json.dumps(measure(name, dtype, int(rank), int(ranks), store)))
        return 0
    worst, share = 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        random_llama(Path(folder))
        for title, (name, dtype) in CASES.items():
            (row,) = load(name or folder, dtype, 1)
            ratio = row["peak"] / row["weights"]
            worst = max(worst, ratio)
            mib = f"weights {row['weights'] / 2**20:6.1f} MiB  peak {row['peak'] / 2**20:6.1f} MiB"
            print(f"{title:26} {mib}  {ratio:.3f}  {row['seconds']:.2f} s")
            if not name:
                peak = max(rank["peak"] for rank in load(folder, dtype, 2))
                share = max(share, peak / row["peak"])
                print(
                    f"{'  a rank of two':26} peak {peak / 2**20:6.1f} MiB  {peak / row['peak']:.3f} of one rank's"
                )
    print(f"worst {worst:.3f}, limit {LIMIT}; a rank of two at most {share:.3f}, limit {SHARE}")
    return 0 if worst <= LIMIT and share <= SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
