"""One worker for each chip of a slice, that share the layers of a model: on one host, and on two through Ray.

The chips are simulated by a stand-in for torch_tpu, which reads the variables of a slice and refuses what the real one
refuses. Workers, Ray's actors and sums over ranks are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opgraft import LLM
from opgraft.platforms.tpu.slices import FIRST_PORT
from support.random_decoders import written
from support.slice_scenes import SETTINGS, answers
from support.small_tokenizers import trained_tokenizer
from support.torch_tpu_stand_in import installed

TENSOR = """
import json, sys
from support.slice_scenes import SETTINGS, answers
from opgraft import LLM

llm = LLM(sys.argv[1], **SETTINGS, **{"parallel.tensor": 2})
core = llm.engine.core
classes = {row.name: [row.cls, row.remark] for row in core.explain().classes}
print(json.dumps([answers(llm), classes]))
llm.shutdown()
"""


OF_SLICES = ("TPU_", "TORCH_TPU_", "CLOUD_TPU_", "PJRT_", "RAY_", "MASTER_")
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    place = tmp_path_factory.mktemp("slice") / "llama"
    written("Llama", place, vocab_size=400, max_position_embeddings=128, num_hidden_layers=2)
    trained_tokenizer().save(str(place / "tokenizer.json"))
    return place


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The tokens of one process on the CPU."""
    llm = LLM(str(folder), **SETTINGS)
    found = answers(llm)
    llm.shutdown()
    return found


def free_chips(count: int) -> list[str]:
    """The numbers of chips whose processes listen at free ports, in ascending order."""
    found: set[int] = set()
    while len(found) < count:
        # Below the ports that the system gives to connections; other runs choose at random, too.
        chip = random.SystemRandom().randrange(1000, 20000)
        with contextlib.suppress(OSError), socket.create_server(("", FIRST_PORT + chip)):
            found.add(chip)
    return [str(chip) for chip in sorted(found)]


def run_on_slice(
    arguments: list[str], site: Path, python: str = sys.executable, **variables: str
) -> Any:
    """Run a program where the stand-in is installed, and return the JSON that it prints last."""
    path = os.pathsep.join((str(installed(site)), str(Path(__file__).parents[1])))
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OF_SLICES) and name not in OF_LAUNCHERS
    }
    environ |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        [python, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            written, errors = process.communicate(timeout=400)
        finally:
            # Workers and Ray may outlive a program that fails.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-4000:]
    return json.loads(written.splitlines()[-1])


def test_two_chips_of_a_host(
    folder: Path, expected: list[list[int]], tmp_path: Path, warm_python: str
) -> None:
    """Programs of both ranks sum by operators of torch, and give the tokens of one process."""
    chips = ",".join(free_chips(2))
    program = ["-c", TENSOR, str(folder)]
    found, classes = run_on_slice(program, tmp_path, warm_python, TPU_VISIBLE_CHIPS=chips)
    assert found == expected
    worker, _ = classes["worker"]
    assert worker.endswith("TpuWorker")
    _, remark = classes["model_runner"]
    assert remark == "2 shapes are compiled by tpu"


def test_two_hosts_of_two_chips(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Ray places a worker on each chip, the first host's first; a part of the slice is refused."""
    pytest.importorskip("ray")
    script = str(Path(__file__).parents[1] / "support" / "slice_scenes.py")
    chips = free_chips(4)
    seen = run_on_slice([script, str(folder), *chips], tmp_path)
    assert seen["answers"] == expected
    assert seen["chips"] == [[chip] for chip in chips]
    assert seen["first_host"] == [True, True, False, False]
    assert "3 workers have a chip each" in seen["part_of_a_slice"]
