"""Running Python code in a child process that cannot hold this one up, whatever it or its own children do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgraft.errors import ChildError

if TYPE_CHECKING:
    import subprocess

_PREFACE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); reply_to = sys.argv[2]\n"


def ask_child(
    code: str, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None, time_limit: float = 10.0
) -> Any:
    """Run ``code`` in a new interpreter with this one's ``sys.path``; returns what it writes to ``reply_to`` as JSON.

    The code finds the name of that file in ``reply_to`` and its arguments in ``sys.argv[3:]``. The answer goes through
    a file, because a pipe stays open as long as any process that the child started has it.

    Raises:
        ChildError: the child could not be started, ran past ``time_limit`` seconds, failed, or wrote no JSON; the
            message says which, with the last line that it wrote to stderr.
    """
    import subprocess  # these two cost 10 ms, which detection should not pay where no child is asked
    import tempfile

    with tempfile.TemporaryDirectory(prefix="opgraft-") as folder:
        reply, complaints = Path(folder, "reply.json"), Path(folder, "stderr")
        path = json.dumps([str(entry) for entry in sys.path])
        command = [sys.executable, "-I", "-c", _PREFACE + code, path, str(reply), *arguments]
        try:
            with complaints.open("wb") as stderr:
                child = subprocess.Popen(  # noqa: S603  # our own interpreter
                    command,
                    env=None if environ is None else dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    start_new_session=True,
                )
        except (OSError, ValueError, TypeError) as error:
            raise ChildError(f"no child process could be started: {error}") from error
        status = _wait(child, time_limit)
        if status != 0:
            lines = complaints.read_text(errors="replace").strip().splitlines()
            raise ChildError(f"its process ended with status {status}{f': {lines[-1]}' if lines else ''}")
        try:
            return json.loads(reply.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ChildError(f"its answer cannot be read: {error}") from error


def _wait(child: subprocess.Popen[bytes], time_limit: float) -> int:
    import signal
    import subprocess

    try:
        return child.wait(time_limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with what it has started itself
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:  # stuck in the kernel, where no signal reaches it
            child.returncode = -signal.SIGKILL
        raise ChildError(f"it gave no answer within {time_limit:g} s and was stopped") from None
