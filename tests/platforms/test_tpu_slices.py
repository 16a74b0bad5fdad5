"""The variables of a process of a slice, by what is known of hosts and chips."""

from __future__ import annotations

import pytest
from opgraft.engine.workers.rank_places import RankPlaces
from opgraft.errors import PlatformError
from opgraft.platforms.tpu.slices import slice_variables

TWO_HOSTS = ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2")
ALL = "10.0.0.1:8476,10.0.0.1:8477,10.0.0.2:8476,10.0.0.2:8477"


def on_one_host(size: int, rank: int = 0) -> RankPlaces:
    return RankPlaces(rank, ("localhost",) * size, tuple(range(size)))


def test_a_process_of_two_hosts() -> None:
    """Both packages find number, chip, address, the addresses of all, and a mesh of single chips."""
    places = RankPlaces(3, TWO_HOSTS, (0, 1, 0, 1), ("0", "1", "0", "1"))
    assert slice_variables(places, {"TPU_TOPOLOGY": "2x2"}) == {
        "TPU_VISIBLE_CHIPS": "1",
        "TPU_PROCESS_BOUNDS": "2,2,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "2,2,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": ALL,
        "TPU_PROCESS_PORT": "8477",
        "CLOUD_TPU_TASK_ID": "3",
        "PJRT_LOCAL_PROCESS_RANK": "1",
        "PJRT_LOCAL_PROCESS_COUNT": "2",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ALL,
        "TORCH_TPU_TOPOLOGY": "2,2,1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
    }


@pytest.mark.parametrize(
    ("environ", "mesh"),
    [
        ({"TPU_TOPOLOGY": "2x4"}, "2,4,1"),
        ({"TPU_TOPOLOGY": "2x2x2"}, "2,2,2"),
        ({"TPU_PROCESS_BOUNDS": "1,2,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1"}, "2,4,1"),
        ({"TPU_HOST_BOUNDS": "2,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, "4,2,1"),
        (
            {"TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_TOPOLOGY": "8"},
            "8,1,1",
        ),
    ],
)
def test_the_mesh_of_a_slice_is_what_a_variable_says(environ: dict[str, str], mesh: str) -> None:
    """A variable for one chip, as Ray sets it for an actor, is passed over."""
    places = RankPlaces(0, ("a",) * 4 + ("b",) * 4, (0, 1, 2, 3) * 2)
    assert slice_variables(places, environ)["TPU_PROCESS_BOUNDS"] == mesh


@pytest.mark.parametrize(("size", "mesh"), [(1, "1,1,1"), (2, "1,2,1"), (4, "2,2,1"), (8, "2,4,1")])
def test_a_part_of_a_host_needs_no_variable(size: int, mesh: str) -> None:
    """The chips of one host form a known mesh, whatever larger slice the variables describe."""
    for environ in ({}, {"TPU_TOPOLOGY": "4x4"}):
        assert slice_variables(on_one_host(size), environ)["TORCH_TPU_TOPOLOGY"] == mesh


def test_visible_chips_are_taken_in_their_order() -> None:
    """The second replica of a host has the chips behind those of the first, and ports of its own."""
    second = RankPlaces(1, ("localhost",) * 2, (2, 3))
    found = slice_variables(second, {"TPU_VISIBLE_CHIPS": "4,5,6,7"})
    assert found["TPU_VISIBLE_CHIPS"] == "7"
    assert found["TPU_PROCESS_ADDRESSES"] == "localhost:8482,localhost:8483"
    assert found["TPU_PROCESS_PORT"] == "8483"


def test_processes_of_a_launcher_name_their_hosts() -> None:
    """torchrun tells no addresses; the hosts of the slice are in a variable, in the order of their numbers."""
    places = RankPlaces(2, ("",) * 4, (0, 1, 0, 1))
    environ = {"TPU_TOPOLOGY": "2x2", "TPU_WORKER_HOSTNAMES": "10.0.0.1, 10.0.0.2"}
    assert slice_variables(places, environ)["TPU_PROCESS_ADDRESSES"] == ALL
    with pytest.raises(PlatformError, match=r"4 processes .* are on 2 hosts, .* names 1: set it"):
        slice_variables(places, environ | {"TPU_WORKER_HOSTNAMES": "10.0.0.1"})


FAULTS: dict[str, tuple[RankPlaces, dict[str, str], str]] = {
    "no mesh of one host": (on_one_host(3), {}, r"3 chips of a host form no mesh: start one of 1"),
    "a part of two hosts": (
        RankPlaces(0, ("a", "a", "b"), (0, 1, 0)),
        {"TPU_TOPOLOGY": "2x2"},
        r"3 workers on 2 hosts .*process for every chip of a slice \(TPU_TOPOLOGY says 4\): set",
    ),
    "nothing is known of two hosts": (
        RankPlaces(0, ("a", "b"), (0, 0)),
        {},
        r"no variable describes the slice.*TPU_TOPOLOGY, such as 2x4, on every host",
    ),
    "no numbers": (on_one_host(2), {"TPU_TOPOLOGY": "2xmany"}, r"TPU_TOPOLOGY is '2,many'"),
    "too many numbers": (on_one_host(2), {"TPU_TOPOLOGY": "1x1x1x2"}, r"up to three numbers"),
    "no chip of a number": (
        RankPlaces(0, ("a", "a"), (0, 1), ("0", "one")),
        {},
        r"a chip has the id 'one': expected a number",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_no_slice_is_refused(case: str) -> None:
    """libtpu would wait for processes that never come: the message says what is missing."""
    places, environ, words = FAULTS[case]
    with pytest.raises(PlatformError, match=words):
        slice_variables(places, environ)
