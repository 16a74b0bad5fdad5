"""Workers on the hosts of a Ray cluster: the tokens of one process, and every death is told."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opgraft.engine.ray_placement import local_ranks, order_of
from opgraft.engine.ray_worker import PROGRESS, STACK, Teller, Where
from opgraft.engine.worker_progress import Progress
from opgraft.machine.channel import Channel
from opgraft.machine.interfaces import interface_of
from random_decoders import written
from small_tokenizers import trained_tokenizer

PATIENCE = 240


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray") / "llama"
    written("Llama", folder, vocab_size=400, max_position_embeddings=128)
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    command = [sys.executable, str(Path(__file__).with_name("ray_scenes.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_tokens_are_those_of_one_process(seen: Any) -> None:
    assert seen["two"] == seen["alone"]


def test_ranks_lie_on_both_hosts_and_the_engines_is_the_first(seen: Any) -> None:
    assert len(set(seen["nodes"])) == 2
    assert seen["nodes"][0] == seen["own_node"]


def test_nothing_is_left_behind(seen: Any) -> None:
    """Actors end with the engine."""
    assert seen["actors"] == 2
    assert (seen["actors_after_shutdown"], seen["actors_in_the_end"]) == (0, 0)


def test_replicas_share_the_cluster(seen: Any) -> None:
    """Both join it at once, and it is left with the last."""
    assert seen["replicas"] == seen["alone"]
    assert seen["actors_of_replicas"] == 2
    assert not seen["still_joined"]


def test_the_loss_of_a_host_ends_requests_in_time(seen: Any) -> None:
    assert len(seen["lost"]["errors"]) == seen["lost"]["asked"]
    assert all("rank 1 has ended" in each for each in seen["lost"]["errors"])
    assert seen["lost"]["seconds"] < 5
    assert "rank 1 has ended" in seen["afterwards"]


def test_a_rank_that_hangs_is_named_with_those_that_wait(seen: Any) -> None:
    assert len(seen["stopped"]) == 2
    for error in seen["stopped"]:
        assert "rank 1 (unknown) did not come to the end of a call within 3 seconds, and rank 0 wait" in error


def test_workers_start_again_on_the_cluster(seen: Any) -> None:
    """Ray places others, which give the same tokens."""
    assert seen["started_again"] == seen["alone"]


def test_a_worker_tells_what_it_does_beside_that() -> None:
    """The thread that answers sees the stage that was noted last, and the stack of the main thread."""
    here, there = socket.socketpair()
    asking, teller = Channel(here), Teller(Channel(there))
    for progress in (Progress(0, "starting"), Progress(7, "step 5")):
        teller.note(progress)
        asking.send(PROGRESS)
        assert asking.receive() == progress
    asking.send(STACK)
    assert "test_a_worker_tells_what_it_does_beside_that" in asking.receive()
    asking.close()
    teller.join()


def test_too_few_devices_are_told_with_numbers(seen: Any) -> None:
    assert "no room for 2 workers of 1 CPU each within 1 s" in seen["no_room"]
    assert re.search(r"its hosts have [12] CPU in all, and 1 CPU free", seen["no_room"])


def test_ranks_are_ordered_by_host_and_device() -> None:
    """Numbers count as numbers, and other ids follow their own order."""
    places = [
        Where("b", "10.0.0.2", 1, {"GPU": ("0",)}),
        Where("a", "10.0.0.1", 1, {"GPU": ("10",)}),
        Where("a", "10.0.0.1", 1, {"GPU": ("9",)}),
        Where("b", "10.0.0.2", 1, {"GPU": ("GPU-1",)}),
    ]
    found = sorted(places, key=lambda where: order_of(where, "b"))
    assert [(where.node, *where.devices["GPU"]) for where in found] == [
        ("b", "GPU-1"),
        ("b", "0"),
        ("a", "9"),
        ("a", "10"),
    ]


def test_local_ranks_count_within_a_host() -> None:
    assert local_ranks(["a", "a", "b", "a"]) == [(0, 3), (1, 3), (0, 1), (2, 3)]


def test_the_interface_of_this_host_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
