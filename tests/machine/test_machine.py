"""Recorded machines, and children that are asked something."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from opgraft.errors import ChildError, InputError
from opgraft.machine import child
from opgraft.machine.child import ask_child, run_child
from opgraft.machine.machine import RECORD, Machine, masked

GOOD = {"environ": {"A": "1"}, "packages": {}, "torch": None, "denied": []}


@pytest.mark.parametrize(
    "damage",
    [
        {"environ": {"A": 5}},
        {"environ": {"A=B": "x"}},
        {"environ": ["A"]},
        {"packages": {"torch": 2}},
        {"torch": {"version": "2"}},
        {"denied": 3},
    ],
)
def test_a_damaged_record_is_an_error(tmp_path: Path, damage: dict) -> None:
    """Values of other types than a recording has are rejected when it is opened, not by a probe later."""
    (tmp_path / RECORD).write_text(json.dumps({**GOOD, **damage}))
    with pytest.raises(InputError, match="is no recorded machine"):
        Machine.recorded(tmp_path)


def test_a_record_that_nests_without_end_or_is_a_pipe(tmp_path: Path) -> None:
    """Neither endless nesting nor a pipe in place of the file holds the reader up."""
    (tmp_path / RECORD).write_text("[" * 200_000)
    with pytest.raises(InputError, match="is no recorded machine"):
        Machine.recorded(tmp_path)
    (tmp_path / RECORD).unlink()
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(InputError, match="is no recorded machine"):
        Machine.recorded(tmp_path)


def test_paths_with_a_null_byte_are_nowhere() -> None:
    """A path that no file can have is absent to every question."""
    machine = Machine()
    assert (machine.read("/a\0"), machine.link("/a\0"), machine.names("/a\0")) == (None, None, [])
    assert not machine.exists("/a\0")
    assert not machine.may_open("/a\0")


def test_a_child_answers_through_a_file() -> None:
    """What the child writes as JSON comes back; what it prints does not matter."""
    assert ask_child(
        "print('noise'); open(reply_to, 'w').write(json.dumps(sys.argv[3:]))", ["a"]
    ) == ["a"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('broken')", "status 1: ValueError: broken"),
        ("pass", "its process ended with status 0"),
        ("open(reply_to, 'w').write('{')", "cannot be read"),
        ("import time; time.sleep(60)", r"no answer within 0\.5 s"),
    ],
)
def test_a_child_that_gives_no_answer(code: str, message: str) -> None:
    """Failing, silent, garbled and slow children are told apart."""
    with pytest.raises(ChildError, match=message):
        ask_child(code, time_limit=0.5 if "sleep" in code else 10)


@pytest.mark.parametrize("children", [child._CHILDREN, "/proc/{0}/of/another/kernel"])
def test_a_child_that_takes_too_much_memory_is_stopped(
    monkeypatch: pytest.MonkeyPatch, children: str
) -> None:
    """Well before its time is over; one that keeps within it is not. A kernel may name no children of processes."""
    monkeypatch.setattr(child, "_CHILDREN", children)
    hungry = "import time; kept = bytearray(200 << 20); time.sleep(60)"
    ended = run_child(hungry, time_limit=50, memory_limit=100 << 20)
    assert ended.status is None
    assert ended.memory > 100 << 20
    modest = run_child("open(reply_to, 'w').write('1')", memory_limit=1 << 30)
    assert (modest.status, modest.memory, modest.reply) == (0, 0, "1")


def test_values_of_variables_are_masked(tmp_path: Path) -> None:
    """Secrets wherever they stand, others as words; paths that exist are told."""
    there, gone = str(tmp_path), str(tmp_path / "gone")
    variables = {
        "ACME_TOKEN": "x9q",
        "ACME_KEY": "/k/9z+",
        "CI_KEY": "ab",
        "ACME_URL": "db.host",
        "ACME_HOME": there,
    }
    variables |= {
        "ACME_SHORT": "short",
        "ACME_GONE": gone,
        "AN_ACME_URL_SECRET": "same as",
        "ZACME": "same as",
    }
    told = f"key_x9q /k/9z+2 ab my_db.host db.host {there} short {gone} same as"
    assert masked([told], variables) == [
        f"key_$ACME_TOKEN $ACME_KEY2 ab my_db.host $ACME_URL {there} short $ACME_GONE $AN_ACME_URL_SECRET"
    ]
