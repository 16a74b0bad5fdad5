"""Servers whose model ranks share, and the same on the command line: answers are those of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import Server, processes_of_model, serving

TENSOR = ("--parallel.tensor", "2")
RAY = ("--parallel.pipeline", "3", "--parallel.executor", "ray")
LOCAL = {"RAY_ADDRESS": "local"}
SMOLLM2 = ("--dtype", "float32", "--load.progress", "false", "--cache.num_blocks", "256")
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1, "seed": 5},
    {"prompt": "a dog and a bird"},
)


def texts(server: Server) -> list[str]:
    answers = [server.complete(max_tokens=12, ignore_eos=True, **given).json() for given in ASKED]
    return [answer["choices"][0]["text"] for answer in answers]


def test_a_server_of_two_ranks(server: Server, checkpoint: Path) -> None:
    """Each has a process of its own, and together they answer as one does, at random too."""
    with serving(checkpoint, *TENSOR) as ranks:
        assert len(processes_of_model(ranks)) == 2
        assert texts(ranks) == texts(server)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[list[str]]:
    """What one process answers."""
    with serving("smollm2", *SMOLLM2) as server:
        yield texts(server)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [TENSOR, RAY], ids=["tensor", "stages on Ray"])
def test_a_server_of_ranks_of_smollm2(smollm2: list[str], ranks: tuple[str, ...]) -> None:
    """The real model, over processes of this host and over Ray, also with fewer processors than stages."""
    with serving("smollm2", *SMOLLM2, *ranks, variables=LOCAL) as server:
        assert texts(server) == smollm2


@pytest.mark.slow
def test_stages_of_smollm2_on_ray(cli: Any) -> None:
    """``opgraft run`` answers over Ray as it does in one process."""
    found = []
    for ranks in ((), RAY):
        result = cli(
            "run",
            "smollm2",
            "What is gravity?",
            "--max-tokens",
            "8",
            "--json",
            *SMOLLM2,
            *ranks,
            **LOCAL,
        )
        assert result.returncode == 0, result.stderr
        found.append([answer["tokens"] for answer in json.loads(result.stdout)["answers"]])
    assert found[0] == found[1]
