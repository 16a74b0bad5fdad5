"""Workers on the hosts of a Ray cluster: the tokens of one process, and every death is told."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from opgraft.engine.workers.ray_executor import Door
from opgraft.engine.workers.ray_placement import local_ranks, order_of
from opgraft.engine.workers.ray_worker import STACK, Teller, Where, connected
from opgraft.engine.workers.worker_progress import Progress
from opgraft.machine.channel import Channel
from opgraft.machine.interfaces import interface_of
from support.random_decoders import written
from support.small_tokenizers import trained_tokenizer

PATIENCE = 240
SCENES = Path(__file__).parents[1] / "support" / "ray_scenes.py"


def seen_in(scenes: str, folder: Path) -> Any:
    pytest.importorskip("ray")
    written("Llama", folder, vocab_size=400, max_position_embeddings=128)
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    command = [sys.executable, str(SCENES), str(folder), scenes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks on two hosts, of which one is lost."""
    return seen_in("few", tmp_path_factory.mktemp("ray") / "llama")


@pytest.fixture(scope="module")
def seen_too(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Other splits and other deaths, each of which starts more workers."""
    return seen_in("all_others", tmp_path_factory.mktemp("ray") / "llama")


def test_the_tokens_are_those_of_one_process(seen: Any) -> None:
    """Of two ranks that share each layer, on two hosts."""
    assert seen["two"] == seen["alone"]


def test_ranks_lie_on_both_hosts_and_the_engines_is_the_first(seen: Any) -> None:
    assert len(set(seen["nodes"])) == 2
    assert seen["nodes"][0] == seen["own_node"]


def test_nothing_is_left_behind(seen: Any) -> None:
    """Actors end with the engine, and this process has no connection and no shared memory any more."""
    assert seen["actors"] == 2
    assert seen["actors_in_the_end"] == 0
    assert seen["files"] == []


def test_the_loss_of_a_host_ends_requests_in_time(seen: Any) -> None:
    assert seen["lost"]["errors"]
    assert len(seen["lost"]["errors"]) + seen["lost"]["whole"] == seen["lost"]["asked"]
    assert all(
        re.search(r"rank 1 has ended.*last stage: (after )?step \d", each)
        for each in seen["lost"]["errors"]
    )
    assert seen["lost"]["seconds"] < 5
    assert "rank 1 has ended" in seen["afterwards"]


def test_too_few_devices_are_told_with_numbers(seen: Any) -> None:
    assert "no room for 2 workers of 1 CPU each within 1 s" in seen["no_room"]
    assert re.search(r"its hosts have [12] CPU in all, and 1 CPU free", seen["no_room"])


@pytest.mark.slow
def test_replicas_share_the_cluster(seen_too: Any) -> None:
    """Both join it at once, and it is left with the last; told to, workers end by themselves, and within no limit."""
    assert seen_too["replicas"] == seen_too["alone"]
    assert seen_too["actors"] == 2
    assert seen_too["killed_at_shutdown"] == []
    assert seen_too["actors_after_shutdown"] == 0
    assert not seen_too["still_joined"]


@pytest.mark.slow
def test_devices_are_handed_over_in_the_order_of_ranks(seen_too: Any) -> None:
    """The engine's host comes first, then the devices of the other by their numbers: as Ray has reserved them."""
    (first, own), *others = seen_too["devices"]["ranks"]
    assert (first, own) == (seen_too["devices"]["own_node"], ["0"])
    assert [ids for _, ids in others] == [["0"], ["1"]]
    assert len({node for node, _ in others} - {first}) == 1


@pytest.mark.slow
def test_actors_end_with_an_engine_that_is_killed(seen_too: Any) -> None:
    """Nobody tells them: the end of the process that they are of does. Before, two stages gave the same tokens."""
    assert seen_too["killed_engine"]["answers"] == seen_too["alone"]
    assert seen_too["killed_engine"]["actors"] == [2, 0]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_those_that_wait(seen_too: Any) -> None:
    """Ray places others, which give the same tokens."""
    assert len(seen_too["stopped"]) == 2
    for error in seen_too["stopped"]:
        assert re.search(
            r"rank 1 \(after step \d+\) did not come to the end of a call within 3 seconds, and rank 0 wait",
            error,
        )
    assert seen_too["two"] == seen_too["alone"]
    assert seen_too["started_again"] == seen_too["alone"]


@pytest.mark.slow
def test_nothing_is_left_behind_of_others(seen_too: Any) -> None:
    assert seen_too["actors_in_the_end"] == 0
    assert seen_too["files"] == []


def test_a_worker_tells_each_stage_unasked_and_its_stack_where_it_is_asked() -> None:
    """So a stage is known of one that answers no more; the stack is that of the main thread."""
    here, there = socket.socketpair()
    telling, teller = Channel(here), Teller(Channel(there))
    stages = [Progress(0, "starting"), Progress(7, "step 5")]
    assert not telling.has_news
    for progress in stages:
        teller.note(progress)
    assert telling.has_news
    assert [telling.receive() for _ in stages] == stages
    telling.send(STACK)
    assert "test_a_worker_tells_each_stage" in telling.receive()
    telling.close()
    teller.note(stages[0])
    teller.join()


def test_a_stranger_who_says_nothing_holds_up_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    """All are heard at once; who has not the secret is closed, and so is who leaves."""
    token = secrets.token_bytes(32)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        closing(Door(listening, token)) as door,
        ExitStack() as use,
    ):
        strangers = [
            use.enter_context(socket.create_connection(listening.getsockname())) for _ in range(6)
        ]
        strangers[0].sendall(bytes(37))
        strangers[1].close()
        worker = use.enter_context(socket.create_connection(listening.getsockname()))
        worker.sendall(token + bytes((2,)) + (3).to_bytes(4, "little"))
        found: list[Any] = []
        while not found:
            found = door.greeted(0.1)
        assert [place for place, _ in found] == [(3, 2)]
        assert strangers[0].recv(1) == b""
        found[0][1].close()
    assert "without the secret of its workers" in caplog.text


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
    """Other replicas may be there too: each takes its part of the memory alone."""
    assert local_ranks(["a", "a", "b", "a"]) == [(0, 3), (1, 3), (0, 1), (2, 3)]
    assert local_ranks(["a", "b", "a"], 2, 4) == [(4, 8), (2, 4), (5, 8)]


def test_an_engine_that_takes_no_connections_is_not_waited_for() -> None:
    """Its listener has no room for another one, so that none is made and none refused."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        place = listening.getsockname()
        with connected(place, 30), pytest.raises(TimeoutError):
            connected(place, 0.2)


def test_the_interface_of_this_host_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None


SILENT = """
import ctypes, fcntl, socket, struct, sys, threading
from opgraft.engine.workers.ray_worker import connected, watch
from opgraft.engine.workers.remote_workers import RemoteWorkers, Started
from opgraft.engine.workers.worker_link import WorkerLink
from opgraft.machine.channel import Channel, encoded

UP, RUNNING, SET_FLAGS, NEW_NETWORK = 0x1, 0x40, 0x8914, 0x40000000
if ctypes.CDLL(None).unshare(NEW_NETWORK):
    sys.exit("may not")

def loopback(flags):
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", flags))

loopback(UP | RUNNING)
listening = socket.create_server(("127.0.0.1", 0))
ours, theirs = [], []
for _ in range(6):
    ours.append(connected(listening.getsockname(), 9))
    theirs.append(listening.accept()[0])
for connection in theirs:
    watch(connection)
loopback(0)
said = {}

class Link(WorkerLink):
    how = None

    def ended(self, patience=0.0):
        return self.how

    def note_silence(self):
        self.how = "or is cut off"

    def kill(self):
        pass


def hear(number):
    channel = Channel(ours[number])
    try:
        if number == 2:
            RemoteWorkers(Started([Link(0, channel, Channel(ours[3]))]), 30.0).reply(
                20, lambda link: link.calls.receive()
            )
        if number == 4:
            RemoteWorkers(Started([Link(0, Channel(ours[5]), channel)]), 30.0).ask_beside(encoded(()))
        if number:
            channel.send("unacknowledged")
        channel.receive()
    except Exception as error:
        said[number] = f"{type(error).__name__} {error}"

threads = [threading.Thread(target=hear, args=(number,), daemon=True) for number in (0, 1, 2, 4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(8)
print(said)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="takes a network of its own")
def test_a_host_that_vanishes_without_a_word_is_told_in_seconds(warm_python: str) -> None:
    """Its connections fail, idle or not, as those of a host that is silent, and nobody asks how its process has ended.

    Four seconds pass, in which no work is done.
    """
    done = subprocess.run(
        [warm_python, "-c", SILENT], capture_output=True, text=True, timeout=60, check=False
    )
    if "may not" in done.stderr:
        pytest.skip("this process may have no network of its own")
    assert done.stdout.count("ConnectionAbortedError [Errno 110] the other host is silent") == 2, (
        done
    )
    assert (
        done.stdout.count("the process of the worker has ended, or is cut off; last stage: unknown")
        == 2
    ), done
