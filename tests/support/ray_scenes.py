"""Scenes on a Ray cluster of two hosts, simulated by its own utility: prints what was seen in each, as JSON.

A process of its own, as Ray leaves threads and variables behind: ``python ray_scenes.py FOLDER SCENES``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from opgraft import LLM, OpgraftConfig, SamplingParams, set_config
from opgraft.engine.workers.ray_executor import RayLink
from opgraft.engine.workers.ray_placement import Placement
from opgraft.errors import OpgraftError
from ray.cluster_utils import Cluster

SETTINGS: dict[str, Any] = {
    "model.dtype": "float32",
    "model.max_model_len": 64,
    "cache.num_blocks": 64,
    "load.progress": False,
}
TWO = {"parallel.tensor": 2, "parallel.executor": "ray"}
PROMPTS = ["the cat", "a dog and a bird", "number"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(seed=5, max_tokens=12),
    SamplingParams(
        temperature=0, max_tokens=20, structured_output={"json": {"type": "integer", "maximum": 99}}
    ),
]


def answers(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, PARAMS)]


def actors() -> list[int]:
    """Process ids of Ray's actors on this machine that are ours."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::RayWorker" in each.read_bytes():
                found.append(int(each.parent.name))
        except OSError:  # it has ended
            continue
    return found


def error_of(llm: LLM) -> str:
    try:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))
    except OpgraftError as error:
        return str(error)
    return ""


def lost(llm: LLM, cluster: Cluster, node: Any) -> dict[str, Any]:
    """Kill a host in the middle of answers, of which the cache holds few at once: some may have ended before."""
    seen: dict[str, Any] = {}

    def ask() -> None:
        found = llm.generate(
            PROMPTS * 40, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        )
        seen["errors"] = [answer.error for each in found for answer in each.outputs if answer.error]
        seen["whole"] = sum(
            len(answer.token_ids) == 48 for each in found for answer in each.outputs
        )
        seen["ended"] = time.monotonic()

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.1)
    start = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    asking.join(60)
    return seen | {"asked": len(PROMPTS) * 40, "seconds": seen["ended"] - start}


def stopped(llm: LLM) -> list[str]:
    """Stop the process of the second rank, which then does not answer anybody."""
    os.kill(llm.engine.core.executor.workers.links[1].placed.where.process, signal.SIGSTOP)
    found = llm.generate(PROMPTS[:2], PARAMS[:2])
    return [answer.error or "" for each in found for answer in each.outputs]


def killed_by(end: Callable[[], None]) -> list[int]:
    """Ranks whose processes did not end by themselves."""
    killed, kill = [], RayLink.kill

    def noting(self: RayLink) -> None:
        killed.append(self.rank)
        kill(self)

    RayLink.kill = noting  # type: ignore[method-assign]
    try:
        end()
    finally:
        RayLink.kill = kill  # type: ignore[method-assign]
    return killed


def devices() -> dict[str, Any]:
    """Where three actors are that have a device each, in the order of ranks."""
    placement = Placement(ray, OpgraftConfig(), 3, {"CPU": 0.25, "GPU": 1.0}, {}, 60)
    found = [(each.where.node, each.where.devices["GPU"]) for each in placement.ranks]
    own = ray.get_runtime_context().get_node_id()
    placement.end()
    return {"own_node": own, "ranks": found}


ENGINE = """
import json, sys
sys.path.insert(0, sys.argv[2])
from ray_scenes import LLM, SETTINGS, answers
llm = LLM(sys.argv[1], **SETTINGS, **{"parallel.pipeline": 2, "parallel.executor": "ray"})
print(json.dumps(answers(llm)), flush=True)
sys.stdin.read()
"""


def killed_engine(folder: str) -> dict[str, Any]:
    """Answers of stages on both hosts, whose engine is a process of its own, and actors before and after its death."""
    command = [sys.executable, "-c", ENGINE, folder, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        found, before = json.loads(engine.stdout.readline()), len(actors())
        engine.kill()
    return {"answers": found, "actors": [before, left(0)]}


def files() -> list[str]:
    """Sockets at which this process listens or is connected by the network, and memory that it shares."""
    tables = [
        Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")
    ]
    sockets = {f"socket:[{line.split()[9]}]" for table in tables for line in table}
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.islink(link)]
    return [each for each in opened if each in sockets or each.startswith("/memfd")]


def left(wanted: int) -> int:
    """The number of actors, once it is the one that is wanted, or after a while."""
    deadline = time.monotonic() + 10
    while len(actors()) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(actors())


def few(folder: str, cluster: Cluster, other: Any) -> dict[str, Any]:
    """Two ranks on two hosts, of which one is lost; and the want of another one."""
    out: dict[str, Any] = {}
    llm = LLM(folder, **SETTINGS, **TWO, **{"parallel.step_seconds": 3})
    out["two"] = answers(llm)
    out["nodes"] = [link.placed.where.node for link in llm.engine.core.executor.workers.links]
    out["own_node"] = ray.get_runtime_context().get_node_id()
    out["actors"] = len(actors())
    out["lost"] = lost(llm, cluster, other)
    out["afterwards"] = error_of(llm)
    llm.shutdown()
    try:
        LLM(folder, **SETTINGS, **TWO, **{"parallel.start_seconds": 1})
    except OpgraftError as error:
        out["no_room"] = str(error)
    return out


def all_others(folder: str, cluster: Cluster, other: Any) -> dict[str, Any]:
    """Replicas, devices, stages whose engine is killed, and ranks of which one hangs."""
    out: dict[str, Any] = {}
    llm = LLM(folder, **SETTINGS, **{"parallel.data": 2, "parallel.executor": "ray"})
    out["replicas"] = answers(llm)
    out["actors"] = len(actors())
    out["killed_at_shutdown"] = killed_by(llm.shutdown)
    out["actors_after_shutdown"] = left(0)
    out["still_joined"] = ray.is_initialized()
    out["devices"] = devices()
    out["killed_engine"] = killed_engine(folder)
    llm = LLM(
        folder, **SETTINGS, **TWO, **{"parallel.step_seconds": 3, "parallel.restart_workers": 1}
    )
    out["two"] = answers(llm)
    out["stopped"] = stopped(llm)
    out["started_again"] = answers(llm)
    llm.shutdown()
    return out


def main(folder: str, scenes: Callable[[str, Cluster, Any], dict[str, Any]]) -> None:
    alone = LLM(folder, **SETTINGS)
    out = {"alone": answers(alone)}
    alone.shutdown()
    os.environ |= {"RAY_worker_niceness": "0"}  # 15 else, behind all other tests
    head = {
        "num_cpus": 1,
        "num_gpus": 1,
        "include_dashboard": False,
    }  # as Ray counts; there are none
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=1, num_gpus=2)
    os.environ["RAY_ADDRESS"] = cluster.address
    before = files()
    out |= scenes(folder, cluster, other)
    out["actors_in_the_end"] = left(0)
    out["files"] = [each for each in files() if each not in before]
    cluster.shutdown()
    sys.stdout.write(json.dumps(out) + "\n")


if __name__ == "__main__":
    # As of a server: plugins of each worker are loaded with the settings of the engine.
    with set_config(OpgraftConfig(cpu_keep_memory=True), origin="the scenes"):
        main(sys.argv[1], {scenes.__name__: scenes for scenes in (few, all_others)}[sys.argv[2]])
