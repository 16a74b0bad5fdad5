"""A slice of two hosts with two chips each, as a Ray cluster: prints what was seen, as JSON.

The engine's host is the second one of the slice. A process of its own, as Ray leaves threads and variables behind:
``python slice_scenes.py FOLDER CHIP CHIP CHIP CHIP``, with the stand-in for torch_tpu on ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from opgraft import LLM, SamplingParams
from opgraft.errors import OpgraftError
from ray.cluster_utils import Cluster

SETTINGS: dict[str, Any] = {
    "model.dtype": "float32",
    "model.max_model_len": 32,
    "cache.num_blocks": 32,
    "load.progress": False,
    "scheduler.max_num_seqs": 8,
    "scheduler.max_num_batched_tokens": 8,
}
PROMPTS = ["the cat", "a dog and a bird", "number"]
TOPOLOGY = "2x2"


def answers(llm: LLM) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, greedy)]


def host(number: int, chips: str) -> dict[str, Any]:
    """Arguments of a host of the slice for Ray. One address has both hosts, so the chips have other numbers."""
    variables = {
        "TPU_WORKER_ID": str(number),
        "TPU_TOPOLOGY": TOPOLOGY,
        "TPU_VISIBLE_CHIPS": chips,
    }
    return {
        "num_cpus": 2,
        "resources": {"TPU": 2},
        "include_dashboard": False,
        "env_vars": variables,
    }


def main(folder: str, chips: Sequence[str]) -> None:
    os.environ |= {"RAY_worker_niceness": "0"}
    cluster = Cluster(initialize_head=True, head_node_args=host(1, ",".join(chips[2:])))
    try:
        other = cluster.add_node(**host(0, ",".join(chips[:2])))
        os.environ["RAY_ADDRESS"] = cluster.address
        out = seen_on(folder, other.node_id)
    finally:
        cluster.shutdown()
    sys.stdout.write(json.dumps(out) + "\n")


def seen_on(folder: str, first_host: str) -> dict[str, Any]:
    parallel = {"parallel.executor": "ray", "parallel.tensor": 4, "parallel.ray_cpus": 1}
    llm = LLM(folder, **SETTINGS, **parallel)
    places = [link.placed.where for link in llm.engine.core.executor.workers.links]
    out = {
        "answers": answers(llm),
        "chips": [place.devices["TPU"] for place in places],
        "first_host": [place.node == first_host for place in places],
    }
    llm.shutdown()
    try:
        LLM(folder, **SETTINGS, **{**parallel, "parallel.tensor": 3})
    except OpgraftError as error:
        out["part_of_a_slice"] = str(error)
    return out


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
