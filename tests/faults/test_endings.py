"""Threads, processes and functions of plugins that would keep a command from ending after its answer."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from support.faults.process_rows import PLUGIN

LIMIT = 60.0  # seconds, where a busy machine takes 20 for the answer and 5 for patience

IMPORTS = "import atexit, multiprocessing, threading, time\nfrom concurrent.futures import ThreadPoolExecutor\n"

STARTS = "threading.Thread(target={}, name='acme poll').start()"

OWN = "\ndef poll():\n    while True: time.sleep(0.1)\n"

THREAD = "the thread 'acme poll' of acme 1.0 has not ended 5 s after the answer"

IMPATIENT = "from opgraft.cli import ending, main; ending.PATIENCE = 0.5; main()"

ROWS: dict[str, tuple[str, str]] = {
    "a thread of the import": (STARTS.format("lambda: time.sleep(3600)"), THREAD),
    "a thread of a hook that waits for ever": (
        f"{PLUGIN.format(STARTS.format('threading.Event().wait'))}",
        THREAD,
    ),
    "a thread that another thread starts later": (
        f"{OWN}threading.Timer(0.5, lambda: {STARTS.format('poll')}).start()",
        THREAD,
    ),
    "a job in a pool": (
        f"{OWN}pool = ThreadPoolExecutor(thread_name_prefix='acme')\npool.submit(poll)",
        "the thread 'acme_0' of acme 1.0 has not ended 5 s after the answer",
    ),
    "a function at exit": (
        f"{OWN}atexit.register(poll)",
        "a function of acme 1.0 that runs at exit has not returned 5 s after the answer",
    ),
    "a process": (
        "multiprocessing.get_context('fork').Process(target=poll, name='acme poll').start()",
        "the process 'acme poll' of acme 1.0 has not ended 5 s after the answer",
    ),
    "a function of C at exit": (
        "atexit.register(time.sleep, 3600)",
        "code that runs at exit has not returned 30 s after the answer, so this command ends "
        "without it: 'opgraft plugins doctor' names its plugin.",
    ),
    "a pool that waits for jobs": ("pool = ThreadPoolExecutor()\npool.submit(time.time)", ""),
    "a thread that ends soon": ("threading.Thread(target=time.sleep, args=(1,)).start()", ""),
}
"""By name: what a plugin does, and the beginning of the line that the command ends with."""

ALWAYS = "a pool that waits for jobs"
"""The row of every run of the tests. Others wait for the five seconds of patience."""

DESTRUCTOR = """
class Held:
    def __del__(self, wait=time.sleep):
        wait(3600)
HELD = Held()
"""


@pytest.mark.faults
def test_a_destructor(cold_cli, site) -> None:
    """A command ends without a destructor that never returns, and shows its line."""
    site.plugin("acme", f"{IMPORTS}{DESTRUCTOR}{PLUGIN.format('pass')}")
    ended = cold_cli("ops", "explain", "SiluAndMul")
    assert "plugins: acme (1 of 1 installed plugins active)" in ended.stdout
    assert f'File "{site.folder / "acme.py"}", line 6 in __del__' in ended.stderr


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == ALWAYS else pytest.mark.faults) for name in ROWS],
)
def test_endings(cli, site, name: str) -> None:
    """The answer is whole, the exit code that of the answer, and a line names thread and plugin."""
    source, words = ROWS[name]
    hook = "" if "opgraft_veto" in source else PLUGIN.format("pass")
    own = "" if source.startswith("\n") else OWN
    site.plugin("acme", f"{IMPORTS}{own}{source}\n{hook}")
    began = time.monotonic()
    ended = cli("ops", "explain", "SiluAndMul")
    assert time.monotonic() - began < LIMIT
    assert ended.returncode == 0, ended.stderr
    assert "plugins: acme (1 of 1 installed plugins active)" in ended.stdout
    assert len(ended.stderr.splitlines()) == bool(words), ended.stderr
    assert ended.stderr.startswith(words)
    if "acme" in words:
        assert ended.stderr.endswith(". OPGRAFT_PLUGINS_DISABLE=acme goes without it.\n")


def test_a_command_without_patience(site, warm_python: str) -> None:
    """A command ends without a thread that waits for ever, and a line names thread and plugin."""
    source, _ = ROWS["a thread of a hook that waits for ever"]
    site.plugin("acme", f"{IMPORTS}{source}\n")
    ended = subprocess.run(
        [warm_python, "-c", IMPATIENT, "ops", "explain", "SiluAndMul"],
        env={**os.environ, "PYTHONPATH": str(site.folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert ended.stdout.startswith("op silu_and_mul: ")
    assert ended.stderr == (
        f"{THREAD.replace('5 s', '0.5 s')}, so this command ends without it: make it a daemon. "
        "OPGRAFT_PLUGINS_DISABLE=acme goes without it.\n"
    )


def test_the_doctor_tells_of_threads(cli, site) -> None:
    """The doctor does not wait for a thread, and says who has started it."""
    site.plugin("acme", f"{IMPORTS}{PLUGIN.format(STARTS.format('threading.Event().wait'))}")
    ended = cli("plugins", "doctor")
    assert ended.returncode == 0
    assert (
        "seen: acme 1.0: plugin acme changed the threads of this process, which waits for "
        "'acme poll' to end in its hook opgraft_veto"
    ) in ended.stdout
