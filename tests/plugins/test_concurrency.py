"""Loading plugins while other threads construct ops, fork, spawn or reset the host."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import opgraft
import pytest
from opgraft import load_plugins
from opgraft.ops import RMSNorm
from opgraft.registry import state
from opgraft.registry.state import host_state

PLUGIN = """
import threading, time
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
begun, go_on = threading.Event(), threading.Event()
@opgraft.hookimpl
def opgraft_register_ops(platform):
    class AcmeRMSNorm(RMSNorm):
        def forward_oot(self, x, residual=None):
            return x
    begun.set()
    {wait}
    RMSNorm.register_oot(AcmeRMSNorm)
"""
SLOW = PLUGIN.format(wait="go_on.wait(30)")


THING_CLASS = """
import opgraft
@opgraft.PluggableClass.register("acme_thing")
class Thing(opgraft.PluggableClass):
    def kind(self):
        return 0
"""
THING = """
from acme_thing import Thing
@Thing.register_oot
class AcmeThing(Thing):
    def kind(self):
        return 1
"""


def loading_in_a_thread() -> tuple[threading.Thread, Callable[[], None]]:
    """A thread that has begun to load the plugin acme, and what lets it go on."""
    import acme

    thread = threading.Thread(target=load_plugins)
    thread.start()
    assert acme.begun.wait(30)
    return thread, acme.go_on.set


def constructed() -> str:
    """The class that an op is constructed as."""
    return RMSNorm(4).op_class.__name__


def test_threads_that_construct_wait_for_the_plugins(site) -> None:
    """No thread gets an op that was bound when half of the plugins were there."""
    site.plugin("acme", SLOW)
    loader, go_on = loading_in_a_thread()
    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(constructed) for _ in range(32)]
        go_on()
        assert {each.result(60) for each in results} == {"AcmeRMSNorm"}
    loader.join(60)


def test_a_reset_waits_for_the_plugins(site) -> None:
    """What a plugin registers belongs to the host that loads it; after the reset it is loaded again, once."""
    site.plugin("acme", SLOW)
    loader, go_on = loading_in_a_thread()
    resetting = threading.Thread(target=opgraft.reset)
    resetting.start()
    resetting.join(0.2)
    assert resetting.is_alive()
    go_on()
    resetting.join(60)
    loader.join(60)
    assert host_state().active == []
    assert constructed() == "AcmeRMSNorm"
    assert len(host_state().active) == 1


def test_a_reset_that_the_plugin_waits_for_is_refused(
    site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that joins a thread which resets the host fails with a word about it, and does not hang."""
    site.plugin("acme", PLUGIN.format(wait="from acme_reset import reset; reset()"))
    (site.folder / "acme_reset.py").write_text(
        "import threading, opgraft\nerrors = []\n"
        "def work():\n    try:\n        opgraft.reset()\n    except Exception as error:\n        errors.append(error)\n"
        "def reset():\n    thread = threading.Thread(target=work)\n    thread.start()\n    thread.join()\n"
        "    raise errors[0]\n"
    )
    monkeypatch.setattr(state, "LOADING_PATIENCE", 0.3)
    load_plugins()
    assert (
        "plugins have been loading in another thread for 0.3 s"
        in host_state().plugins["acme"].reason
    )


def test_ops_that_are_constructed_during_resets_are_replaced(site) -> None:
    """An op is bound before a reset or after it, never in between, when no plugin is active."""
    acme = PLUGIN.format(wait="pass") + THING
    site.install(
        "acme",
        {"acme.py": acme, "acme_thing.py": THING_CLASS},
        {"opgraft.plugins": ["acme = acme"]},
    )
    from acme_thing import Thing

    ended = threading.Event()

    def work(make: Callable[[], str]) -> set[str]:
        found = set()
        while not ended.is_set():
            found.add(make())
        return found

    with ThreadPoolExecutor(4) as pool:
        makers = [constructed, constructed, lambda: type(Thing()).__name__]
        results = [pool.submit(partial(work, make)) for make in makers]
        for _ in range(20):
            opgraft.reset()
        ended.set()
        assert set.union(*(each.result(60) for each in results)) <= {"AcmeRMSNorm", "AcmeThing"}


PROGRAM = """
import multiprocessing, os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about forks of processes with threads
import opgraft
from opgraft.ops import RMSNorm
def told(say):
    say.put(RMSNorm(4).op_class.__name__)
if __name__ == "__main__":
    import acme
    loader = threading.Thread(target=opgraft.load_plugins)
    loader.start()
    acme.begun.wait()
    threading.Timer(0.3, acme.go_on.set).start()
    context = multiprocessing.get_context(sys.argv[1])
    say = context.SimpleQueue()
    child = context.Process(target=told, args=(say,))
    child.start()
    child.join(40)
    print(say.get() if child.exitcode == 0 else f"exit code {child.exitcode}", RMSNorm(4).op_class.__name__)
    loader.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_start_while_plugins_load(
    site, tmp_path: Path, warm_python: str, method: str
) -> None:
    """A child has all of the plugins or loads them itself; none inherits a lock that nobody will release."""
    site.plugin("acme", PLUGIN.format(wait="go_on.wait(1)"))
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": str(site.folder), "OPGRAFT_PLUGINS": "acme"}
    command = [warm_python, str(tmp_path / "program.py"), method]
    ran = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.split() == ["AcmeRMSNorm", "AcmeRMSNorm"], ran.stdout + ran.stderr
