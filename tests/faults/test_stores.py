"""Files that opgraft keeps for itself: corrupt, written by two processes at once, or by one that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.planting import PLUGIN, in_time
from faults.store_rows import BROKEN, WRITERS
from opgraft.cli import kept_results

WHOLE = 100_000


@pytest.mark.parametrize("name", BROKEN)
def test_a_kept_result_that_is_none(caplog, name: str) -> None:
    """It does not count, a warning names it, and the next one takes its place where that can be."""
    kept_results.keep("acme", {"number": 1})
    path = Path(os.environ["XDG_STATE_HOME"]) / "opgraft/doctor/acme.json"
    make, words = BROKEN[name]
    if make in (os.mkfifo, Path.mkdir) or "link" in name or "device" in name:
        path.unlink()
    make(path)
    with in_time():
        assert kept_results.look_up("acme") is None
        (told,) = caplog.messages
        kept_results.keep("acme", {"number": 3})
    assert f"the kept result {path} cannot be used and is made anew: " in told
    assert words in told
    if path.is_file() and not path.is_symlink():
        kept = kept_results.look_up("acme")
        assert kept is not None
        assert kept.report == {"number": 3}


@pytest.mark.parametrize("name", WRITERS)
def test_two_that_write_at_once_and_are_killed(site, tmp_path: Path, name: str) -> None:
    """Whoever reads meanwhile, or after that, finds a whole file."""
    site.plugin("acme", PLUGIN)
    write, read = WRITERS[name]
    head = f"import sys\nfrom pathlib import Path\nfolder = {str(tmp_path)!r}\n"
    environ = {**os.environ, "PYTHONPATH": str(site.folder)}
    code = f"{head}{write}\nwrite(0)\nprint(flush=True)\nfor n in range(10**9): write(n)"
    writers = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    found: dict[str, object] = {}
    exec(head + read, found)  # noqa: S102  # of the table
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "\n"
        lengths = set()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            lengths.add(found["read"]())  # type: ignore[operator]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert lengths | {found["read"]()} == {WHOLE}  # type: ignore[operator]
