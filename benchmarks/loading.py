"""Measure the memory that loading takes on top of the weights: ``make bench-loading``.

Each loading runs in a process of its own. Counted is the memory that a process has to itself (RssAnon) and that of the
files it has mapped (RssFile), sampled every millisecond, less what it had when the model was made without memory; the
weights are what the parameters hold when all is done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from opgraft.models import load_weights, open_weights, read_config

LIMIT = 1.1
CASES = {"smollm2 in bfloat16": ("smollm2", "bfloat16"), "smollm2 in float32": ("smollm2", "float32")}


def resident() -> int:
    """Return the bytes of memory of this process, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssFile")))


class Peak(threading.Thread):
    """The largest ``resident()`` until ``done`` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.done = resident(), threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.001):
            self.bytes = max(self.bytes, resident())


def measure(name: str, dtype: str) -> dict[str, float]:
    """Load a checkpoint in this process, whose libraries are imported before the figures."""
    import transformers

    weights = open_weights(name)
    config = read_config(weights)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    load_small(weights)
    before = resident()
    peak = Peak()
    peak.start()
    model.to_empty(device="cpu").tie_weights()
    seconds = load_weights(model, weights.tensors).seconds
    peak.done.set()
    held = sum(parameter.nbytes for parameter in model.parameters())
    return {"weights": held, "peak": peak.bytes - before, "ratio": (peak.bytes - before) / held, "seconds": seconds}


def load_small(weights: object) -> None:
    """Read one tensor of each kind, so that libraries and pools of threads are there before the figures."""
    tensors = getattr(weights, "tensors")  # noqa: B009
    for name in list(tensors)[:3]:
        torch.empty(8, *tensors[name].shape[1:]).copy_(tensors[name][:8])


def plain_copy(folder: Path) -> None:
    """Save the model as safetensors in bfloat16."""
    from safetensors.torch import save_file

    tensors = open_weights("smollm2").tensors
    save_file({name: tensor[...].bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    read_config(open_weights("smollm2")).save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2)
    child = parser.parse_args().child
    if child:
        print(json.dumps(measure(*child)))
        return 0
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        plain_copy(Path(folder))
        for title, (name, dtype) in {**CASES, "safetensors in bfloat16": (folder, "bfloat16")}.items():
            command = [sys.executable, __file__, "--child", name, dtype]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            mib = {key: row[key] / 2**20 for key in ("weights", "peak")}
            figures = f"weights {mib['weights']:6.1f} MiB  peak {mib['peak']:6.1f} MiB  {row['ratio']:.3f}"
            print(f"{title:26} {figures}  {row['seconds']:.2f} s")
            worst = max(worst, row["ratio"])
    print(f"worst {worst:.3f}, limit {LIMIT}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
