"""Files of opgraft's own are written whole, and only where a file is or could be."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from opgraft.base.files import read_regular, replace_file
from opgraft.cli import evidence
from opgraft.errors import InputError

WRITERS: dict[str, Callable[[Path], None]] = {
    "--json": partial(evidence.write, data={}),
    "--html": partial(evidence.write_text, text="<!doctype html>"),
}


@pytest.mark.parametrize("option", WRITERS)
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, option: str, linked: bool) -> None:
    """A pipe, which stands for a device, stays one; so does what a link leads to. The error names the path."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    path = link if linked else pipe
    with pytest.raises(InputError, match=f"{path} cannot be written: it is no regular file"):
        WRITERS[option](path)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("size", [0, 1, 9, 10])
def test_a_file_is_read_up_to_a_limit(tmp_path: Path, size: int) -> None:
    """All of it, or an error; a file of /proc too, whose size is told as 0."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    assert read_regular(path, 10) == b"x" * size
    path.write_bytes(b"x" * 11)
    with pytest.raises(ValueError, match="it is larger than 10 bytes"):
        read_regular(path, 10)
    assert b"\nVmSize:" in read_regular("/proc/self/status", 1 << 16)
    with pytest.raises(ValueError, match="it is larger than 100 bytes"):
        read_regular("/proc/self/status", 100)


@pytest.mark.parametrize("there", [False, True])
def test_a_link_stays_one(tmp_path: Path, there: bool) -> None:
    """The file that it leads to is written, in its own folder, whether it was there before or not."""
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("folder/file")
    if there:
        link.write_text("before")
    replace_file(link, "after", 0o640)
    assert link.is_symlink()
    assert (folder / "file").read_text() == "after"
    assert (folder / "file").stat().st_mode & 0o777 == 0o640
    assert len(list(folder.iterdir())) == 1
