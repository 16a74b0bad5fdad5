"""Code of others that does not come back: a line says whom everybody waits for, and how to go without."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import Distribution

import opgraft
import pytest
import torch
from opgraft import LLM, OpgraftConfig, SamplingParams, load_plugins, set_config
from opgraft.base.watchdog import WATCHDOG
from opgraft.binding import provenance
from opgraft.cli import isolation
from opgraft.ops import RMSNorm
from opgraft.plugins.metadata import Problem, distributions
from opgraft.registry import watching
from support.faults.clock import Clock, eventually
from support.faults.planting import GOOD, answer, in_time, of_brix
from support.faults.platform_rows import HEAD
from support.small_words import word_llama

LONG = "from opgraft.registry import watching; watching.time.passing(6).acquire()"
"""Lets 6 s pass on the clock of the thread that looks."""

HOOK = "platforms = 'any'\nimport opgraft\n@opgraft.hookimpl\ndef {}():\n    {}\n"
DEVICE = f"{HEAD}class Device(CpuPlatform):\n    name = 'acme'\n"

PLUGINS = {
    "while it was loaded": f"{LONG}\n{HOOK.format('opgraft_veto', 'pass')}",
    **{
        f"in its hook {hook}": HOOK.format(hook, LONG)
        for hook in (
            "opgraft_veto",
            "opgraft_config",
            "opgraft_register_ops",
        )
    },
    "in its hook opgraft_graft_adapters": HOOK.format(
        "opgraft_graft_adapters", f"{LONG}; return []"
    ),
}
"""By step of a plugin, the source of a plugin whose step takes long."""

PLATFORMS = {
    "while its class was loaded": {
        "a module": f"{LONG}\n{DEVICE}",
        "a constructor": f"{DEVICE}    def __init__(self): {LONG}\n",
        "a property": f"{DEVICE}    @property\n    def streams(self): {LONG}\n",
        "default_config": (
            f"{DEVICE}    def default_config(self):\n        {LONG}\n"
            "        return CpuPlatform.default_config(self)\n"
        ),
    },
    "in its method prepare": {"prepare": f"{DEVICE}    def prepare(self, config): {LONG}\n"},
}
"""By step of a platform, sources of platforms of which a part takes long."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Time passes only as plugins say, whatever the machine does besides."""
    clock = Clock()
    monkeypatch.setattr(watching, "time", clock)
    monkeypatch.setattr(watching, "STUCK", 600.0)
    yield clock
    clock.end()


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of code that is waited for, but for probes, which have processes of their own."""
    lines = [said for said in caplog.messages if said.startswith("still waiting for ")]
    return [said for said in lines if "the probe of" not in said]


def calls(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of calls of ops."""
    return [said for said in waits(caplog) if " in op " in said]


@pytest.mark.parametrize("step", PLUGINS)
def test_plugins(site, caplog, step: str) -> None:
    """The plugin, its step and the setting are named once, and the plugin counts when it comes back."""
    site.plugin("brix", GOOD)
    site.plugin("acme", PLUGINS[step])
    assert of_brix()["class"] == "BrixRMSNorm"
    told = (
        f"still waiting for plugin 'acme' of acme 1.0 {step}: opgraft has waited for 5 s. "
        "OPGRAFT_PLUGINS_DISABLE=acme goes without it."
    )
    assert waits(caplog) == [told]


@pytest.fixture
def real_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Time passes by itself, without the threads of former tests, and of this one at its end."""
    monkeypatch.setattr(watching, "time", time)
    assert eventually(lambda: watching._LATE.thread is None)
    yield
    assert eventually(lambda: watching._LATE.thread is None)


def test_code_that_keeps_the_lock_of_python(site, capfd, monkeypatch, real_time) -> None:
    """Code in C stops every thread of Python, so the watchdog prints the line of the plugin."""
    monkeypatch.setattr(WATCHDOG, "is_taken", True)
    monkeypatch.setattr(watching, "STUCK", 0.5)
    site.plugin(
        "acme", f"import ctypes\nctypes.PyDLL(None).sleep(1)\n{HOOK.format('opgraft_veto', 'pass')}"
    )
    site.plugin("brix", GOOD)
    assert of_brix()["class"] == "BrixRMSNorm"
    assert f'File "{site.folder / "acme.py"}", line 2 in <module>' in capfd.readouterr().err
    assert eventually(lambda: watching._LATE.thread is None)


def test_the_watchdog_is_left_at_the_end(capfd, monkeypatch, real_time) -> None:
    """Once it is left, nobody stops the watchdog that the end of the process has set."""
    monkeypatch.setattr(WATCHDOG, "is_taken", True)
    watching.leave_watchdog()
    faulthandler.dump_traceback_later(0.2, file=2)
    WATCHDOG.stop()
    assert eventually(lambda: "Timeout (0:00:00.2" in capfd.readouterr().err)


def test_the_watchdog_of_a_program(site, capfd, real_time) -> None:
    """A program that prints its stacks at a crash keeps its watchdog, too, while plugins are loaded."""
    assert faulthandler.is_enabled()
    site.plugin("brix", GOOD)
    faulthandler.dump_traceback_later(2, file=2)
    assert of_brix()["class"] == "BrixRMSNorm"
    assert eventually(lambda: watching._LATE.thread is None)
    assert eventually(lambda: "Timeout (0:00:02" in capfd.readouterr().err)


def test_a_watchdog_without_a_thread_that_looks(capfd, monkeypatch, real_time) -> None:
    """In a process that can start no thread nobody would stop the watchdog, so nothing sets it."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(WATCHDOG, "is_taken", True)
    monkeypatch.setattr(watching, "STUCK", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with watching.told_when_late("a step", None):
            time.sleep(0.3)
    assert "Timeout" not in capfd.readouterr().err


class SlowFinder:
    """A finder of distributions that takes 6 s."""

    def find_distributions(self, context: object) -> Iterator[Distribution]:
        watching.time.passing(6).acquire()
        yield from ()


def test_finders(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finder on sys.meta_path is named, and the way to go without it."""
    before = [each.name for each in distributions() if not isinstance(each, Problem)]
    monkeypatch.setattr(sys, "meta_path", [SlowFinder(), *sys.meta_path])
    assert [each.name for each in distributions() if not isinstance(each, Problem)] == before
    name = f"{__name__}.SlowFinder"
    assert waits(caplog) == [
        f"still waiting for the finder {name} on sys.meta_path, asked for distributions: opgraft "
        f"has waited for 5 s. Uninstall the distribution that adds {name}."
    ]


ROWS = [(step, part) for step, parts in PLATFORMS.items() for part in parts]


@pytest.mark.parametrize(("step", "part"), ROWS)
def test_platforms(site, caplog, step: str, part: str) -> None:
    """The same of a platform, whose distribution the setting names."""
    site.platform("acme", probe="return Evidence(True, 'here')", platform=PLATFORMS[step][part])
    load_plugins()
    assert opgraft.current_platform().name == "acme"
    told = (
        f"still waiting for platform 'acme' of acme-dist 1.0 {step}: opgraft has waited for 5 s. "
        "OPGRAFT_PLUGINS_DISABLE=acme-dist goes without it."
    )
    assert waits(caplog) == [told]


ROW = (
    "import opgraft\nfrom opgraft.ops import RMSNorm\nplatforms = 'any'\n"
    f"def check(*given): {LONG}; return {{}}\n"
    "class Acme(RMSNorm):\n    {}\n"
    "    def forward_oot(self, x, residual=None): return self.forward_native(x, residual)\n"
    "@opgraft.hookimpl\ndef opgraft_register_ops(): RMSNorm.register_oot(Acme{})\n"
)
CHECKS = {
    "the when= condition of Acme of acme 1.0": ROW.format("True", "", ", when=check"),
    "the check of what Acme.forward_oot of acme 1.0 needs": ROW.format(
        "None", "@opgraft.needs(check)", ""
    ),
    "Acme.enabled() of acme 1.0": ROW.format("True", "enabled = classmethod(check)", ""),
}
"""By what opgraft asks of a replacement, the source of a plugin whose answer takes long."""


@pytest.mark.parametrize("asked", CHECKS)
def test_what_replacements_are_asked(site, caplog, asked: str) -> None:
    """The condition of a row, or the check of a kernel, is named with its class and its plugin."""
    site.plugin("acme", CHECKS[asked])
    RMSNorm(8)
    told = f"still waiting for {asked}: opgraft has waited for 5 s."
    assert f"{told} OPGRAFT_PLUGINS_DISABLE=acme goes without it." in waits(caplog)


def test_the_constructor_of_a_replacement(site, caplog) -> None:
    """An op that a script constructs itself is waited for no more silently than one of a model."""
    body = f"RMSNorm.__init__(self, *given, **others)\n        {LONG}"
    site.plugin("acme", KERNEL.format("__init__(self, *given, **others)", body))
    RMSNorm(8)
    told = "still waiting for Acme.__init__ of acme 1.0: opgraft has waited for 5 s."
    assert waits(caplog) == [f"{told} OPGRAFT_PLUGINS_DISABLE=acme goes without it."]


@pytest.mark.parametrize("asked", CHECKS)
def test_what_replacements_are_asked_interrupts(site, capsys, asked: str) -> None:
    """An interrupt that nobody has sent is the plugin's error, and opgraft goes on without the kernel."""
    source = CHECKS[asked].replace(f"{LONG}; return", "raise KeyboardInterrupt; return")
    site.plugin("acme", source)
    code, told = answer(capsys, "ops", "explain", "RMSNorm")
    assert code == 0
    assert "its code raised KeyboardInterrupt, which nobody has sent, at" in told
    assert str(site.folder / "acme.py") in told


KERNEL = (
    "from opgraft.ops import RMSNorm\nplatforms = 'any'\nclass Acme(RMSNorm):\n"
    "    def {}:\n        {}\nRMSNorm.register_oot(Acme)\n"
)
NORM = "forward_oot(self, x, residual=None)"
FUNCTION = (
    "import opgraft\nfrom opgraft.ops import RMSNorm\nplatforms = 'any'\n"
    f"def slow(x, weight, eps, size=None):\n    {LONG}\n"
    "    return opgraft.functional.rms_norm.native(x, weight, eps, size)\n"
    "class Acme(RMSNorm):\n    functional_oot = {'rms_norm': slow}\nRMSNorm.register_oot(Acme)\n"
)
DEFINITION = "return self.forward_native(x, residual)"
WITHIN = f"{LONG.replace('6', '0.5')}; {DEFINITION}"
BUSY = """from opgraft.registry import watching
        passing = watching.time.passing(6)
        while not passing.acquire(blocking=False): pass
        return x"""
KERNELS = {
    "a method": KERNEL.format(NORM, f"{LONG}; {DEFINITION}"),
    "a busy method": KERNEL.format(NORM, BUSY),
    "a function": FUNCTION,
}
"""Sources of plugins with a kernel that takes long."""


TOLD = "still waiting for Acme.forward_oot of acme 1.0 in op rms_norm at "


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels(site, caplog, kind: str) -> None:
    """A kernel that does not return within a step is named once, with op, plugin, place and setting."""
    site.plugin("acme", KERNELS[kind])
    x = torch.ones(2, 8)
    norm = RMSNorm(8)
    for _ in range(2):
        with provenance.kernels_told_when_late():
            norm(x)
    (told,) = calls(caplog)
    assert told.startswith(f"{TOLD}{site.folder / 'acme.py'}:")
    assert ": opgraft has waited for 5 s. To go without it: OPGRAFT_PROVIDERS=rms_norm=nat" in told
    assert "OPGRAFT_PLUGINS_DISABLE=acme" in told


@pytest.mark.parametrize("count", [1, 12])
def test_many_short_calls_are_not_late(site, caplog, clock, count: int) -> None:
    """A long step of many fast calls, of one op or of several, says nothing; neither does native code."""
    site.plugin("acme", KERNEL.format(NORM, WITHIN))
    norms = [RMSNorm(8) for _ in range(count)]
    with provenance.kernels_told_when_late():
        for norm in norms * (18 // count):
            norm(torch.ones(2, 8))
        clock.passes(7)
    assert calls(caplog) == []


class SlowTensor(torch.Tensor):
    """A tensor with which every function takes 6 s on the clock of the thread that looks."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        watching.time.passing(6).acquire()
        return super().__torch_function__(function, types, args, kwargs)


def test_a_native_definition_that_a_kernel_calls(site, caplog) -> None:
    """A definition that takes long is no fault of the plugin that calls it."""
    site.plugin("acme", KERNEL.format(NORM, DEFINITION))
    x = torch.ones(2, 8).as_subclass(SlowTensor)
    with provenance.kernels_told_when_late():
        RMSNorm(8)(x)
    assert waits(caplog) == []


SHARED = """
from opgraft.ops import LayerNorm, RMSNorm
platforms = "any"
class Slow:
    def forward_oot(self, x, residual=None):
        from opgraft.registry import watching; watching.time.passing(6).acquire()
        return x
class Acme(Slow, RMSNorm): pass
class Brix(Slow, LayerNorm): pass
RMSNorm.register_oot(Acme)
LayerNorm.register_oot(Brix)
"""


def test_code_that_kernels_share(site, caplog) -> None:
    """The plugin is named without an op, as nobody can tell which op of the plugin runs."""
    site.plugin("acme", SHARED)
    with provenance.kernels_told_when_late():
        RMSNorm(8)(torch.ones(2, 8))
    (told,) = waits(caplog)
    assert "forward_oot of acme 1.0 at " in told
    assert "in op" not in told
    assert "OPGRAFT_PLUGINS_DISABLE=acme" in told


def test_a_step_within_a_scope_tells_alone(site, caplog) -> None:
    """What a step names itself is not named a second time by its stack."""
    site.plugin("acme", CHECKS["Acme.enabled() of acme 1.0"])
    with provenance.kernels_told_when_late():
        RMSNorm(8)
    (told,) = [line for line in waits(caplog) if "Acme" in line]
    assert "Acme.enabled() of acme 1.0: opgraft has" in told


ASKED = """
from opgraft.ops import RMSNorm
platforms = "any"
COUNT = []
class Brix(RMSNorm):
    def forward_oot(self, x, residual=None): return x
RMSNorm.register_oot(Brix, when=COUNT.append)
"""


def test_the_thread_that_looks_decides_nothing(site, caplog) -> None:
    """A stack is read with the settings of its own thread, and no condition of a plugin is asked for it."""
    site.plugin("acme", FUNCTION)
    site.plugin("brix", ASKED)
    with (
        set_config(OpgraftConfig(providers={"rms_norm": "acme"})),
        provenance.kernels_told_when_late(),
    ):
        opgraft.functional.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
    (told,) = calls(caplog)
    assert told.startswith(TOLD)
    assert sys.modules["brix"].COUNT == []


def test_graft(site, caplog) -> None:
    """A class that sleeps when ``graft`` constructs it is named."""
    body = f"super().__init__(*args, **kwargs); {LONG}; return"
    site.plugin("acme", KERNEL.format("__init__(self, *args, **kwargs)", body))
    opgraft.graft(torch.nn.Sequential(torch.nn.RMSNorm(8)))
    (told,) = waits(caplog)
    assert told.startswith("still waiting for Acme.__init__ of acme 1.0: ")


SLEEPING_NORM = KERNEL.format(
    NORM,
    "from opgraft.registry import watching\n        if x.shape[0] == 3: {0}\n"
    f"        {DEFINITION}",
)
ENGINE = {"load.progress": False, "cache.num_blocks": 300}


def test_a_step_of_the_engine(site, caplog, tmp_path) -> None:
    """A kernel that sleeps in a step of the engine is named while the step waits for it."""
    site.plugin("acme", SLEEPING_NORM.format("watching.time.passing(6).acquire()"))
    llm = LLM(str(word_llama(tmp_path)), **ENGINE)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    (told,) = calls(caplog)
    assert told.startswith(f"{TOLD}{site.folder / 'acme.py'}:")


@pytest.mark.slow
def test_a_step_of_a_server(site, capfd, tmp_path) -> None:
    """The process of a worker, as 'opgraft serve' has one, names the kernel on stderr after five seconds."""
    site.plugin("acme", SLEEPING_NORM.format("watching.time.sleep(15)"))
    folder = str(word_llama(tmp_path))
    llm = LLM(folder, **ENGINE, **{"parallel.executor": "processes"})
    try:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    finally:
        llm.shutdown()
    said = capfd.readouterr().err
    assert f"{TOLD}{site.folder / 'acme.py'}:" in said
    assert "opgraft has waited for 5 s" in said


def test_steps_that_end_in_time(site, caplog, clock) -> None:
    """No line tells of short steps, however many follow each other. The thread that looks ends."""
    for name in ("acme", "brix", "cedar", "daisy"):
        site.plugin(name, HOOK.format("opgraft_veto", LONG.replace("6", "3")))
    load_plugins()
    assert waits(caplog) == []
    clock.end()
    assert eventually(lambda: watching._LATE.thread is None)


def test_the_doctor(site, capsys, caplog, monkeypatch, warm_python: str) -> None:
    """The doctor says in its own process what it waits for and until when, and then finds it."""
    site.plugin("acme", f"import time; time.sleep(3600)\n{HOOK.format('opgraft_veto', 'pass')}")
    site.plugin("brix", GOOD)
    monkeypatch.setattr(watching, "time", time)
    monkeypatch.setattr(watching, "PATIENCE", 0.3)
    monkeypatch.setattr(sys, "executable", warm_python)
    # On a slow machine, a child that has loaded nothing yet takes longer than the first limit.
    for limit in ("4", "8", "80"):
        with in_time(400):
            code, told = answer(capsys, "plugins", "doctor", "--time-limit", limit)
        if "brix (brix 1.0): activated" in told:
            break
    assert code == 4
    longer = f"'opgraft plugins doctor --time-limit {limit}0' waits"
    assert f"did not come back within {limit} s ({longer}" in told
    assert "brix (brix 1.0): activated" in told
    assert (
        "still waiting for plugin 'acme' of acme 1.0 while it was loaded: opgraft has waited for "
        f"0.3 s, and stops it after {limit} s. OPGRAFT_PLUGINS_DISABLE=acme goes without it."
    ) in waits(caplog)


def test_the_doctor_gives_up_after_a_minute() -> None:
    """Ten minutes are for who asks for them."""
    assert isolation.Limits().seconds == 60


@pytest.mark.parametrize("when", ["while it was loaded", "in its hook opgraft_veto"])
def test_an_interrupt_from_outside_is_none_of_the_plugin(site, when: str) -> None:
    """Who presses Ctrl-C while a plugin is loaded ends the program, and handlers are as they were."""
    send = "import signal; signal.raise_signal(signal.SIGINT)"
    body = (send, "pass") if when == "while it was loaded" else ("", send)
    site.plugin("acme", f"{body[0]}\n{HOOK.format('opgraft_veto', body[1])}")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        load_plugins()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_platform_that_interrupts_itself(site, caplog) -> None:
    """A platform whose class raises KeyboardInterrupt is left out by name, and the next one is chosen."""
    site.platform(
        "acme", probe="return Evidence(True, 'here')", platform="raise KeyboardInterrupt\n"
    )
    with caplog.at_level(logging.WARNING, logger="opgraft"):
        assert opgraft.current_platform().name == "cpu"
    (said,) = [said for said in caplog.messages if "platform 'acme' is left out" in said]
    assert "its code raised KeyboardInterrupt, which nobody has sent, at " in said
