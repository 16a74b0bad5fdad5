"""Workers decide as the process that started them, however they are started, or stop with both decisions."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import opgraft
import pytest
from opgraft.base.installed import version_of
from opgraft.config.environment import DECISION, SharedDecision, read_environment
from opgraft.errors import AgreementError, ConfigError
from opgraft.ops import RMSNorm
from opgraft.plugins import quarantine
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state
from support import worker_ways
from support.locks import lock

PARENT = """
import json, multiprocessing, sys
import opgraft
from worker_ways import answers
def work(out):
    out.put(answers())
if __name__ == "__main__":
    opgraft.share_decisions()
    context = multiprocessing.get_context(sys.argv[1])
    out = context.Queue()
    process = context.Process(target=work, args=(out,))
    process.start()
    print(json.dumps(out.get()))
    process.join()
"""
PINNED = """
import multiprocessing, os, sys
from pathlib import Path
import opgraft
from opgraft.plugins.making_locks import lock_installed, write_rows
from opgraft.registry.state import host_state
LOCK, COPY, OTHER = (Path(__file__).with_name(name) for name in ("a.lock", "copy.lock", "other.lock"))
def loaded(lockfile):
    sys.modules.pop("acme", None)
    opgraft.reset()
    try:
        with opgraft.set_config(opgraft.OpgraftConfig(lockfile=lockfile and str(lockfile))):
            opgraft.load_plugins()
        told = "agrees"
    except opgraft.OpgraftError as error:
        told = f"{type(error).__name__}: {error}"
    return f"{told}; imported: {'acme' in sys.modules}"
def work(out):
    for lockfile in (COPY, None, OTHER):
        out.put(loaded(lockfile))
if __name__ == "__main__":
    rows, _ = lock_installed(host_state().settings(), allow_editable=False)
    for lock, kept in ((LOCK, rows), (COPY, rows[::-1]), (OTHER, [])):
        write_rows(lock, kept)
    with opgraft.set_config(opgraft.OpgraftConfig(lockfile=str(LOCK))):
        opgraft.share_decisions()
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=work, args=(out,))
    process.start()
    for _ in range(3):
        print(out.get())
    process.join()
"""
RANKS = """
import json, os, subprocess, sys
import opgraft
from worker_ways import answers
if "RANK" not in os.environ:
    opgraft.share_decisions()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    sys.exit(subprocess.run(torchrun).returncode)
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    opgraft.load_plugins()
dist.barrier()
if dist.get_rank() == 1:
    print(json.dumps(answers()))
dist.barrier()
dist.destroy_process_group()
"""
RAY = """
import json, os
import opgraft, ray
opgraft.share_decisions()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
@ray.remote(num_cpus=0)
class Actor:
    def work(self):
        from worker_ways import answers
        return answers()
print(json.dumps(ray.get(Actor.remote().work.remote())))
ray.shutdown()
"""
PLUGIN = """
import opgraft
from opgraft.distributed import Communicator
from opgraft.ops import RMSNorm
platforms = "any"
class Acme(RMSNorm):
    def forward_oot(self, x, residual=None):
        return self.forward_native(x, residual)
class AcmeCommunicator(Communicator):
    def all_reduce(self, x):
        return super().all_reduce(x)
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(Acme)
    Communicator.register_oot(AcmeCommunicator)
"""
IDLE = "import opgraft\nplatforms = 'any'\n@opgraft.hookimpl\ndef opgraft_veto(): pass\n"


def lines_of(
    site, tmp_path: Path, source: str, *arguments: str, python: str = sys.executable
) -> list[str]:
    """What a program prints that sees the distributions of ``site``, among which are plugins."""
    site.plugin("acme", PLUGIN)
    site.plugin("brix", IDLE)
    (tmp_path / "program.py").write_text(source)
    shutil.copy(worker_ways.__file__, tmp_path / "worker_ways.py")
    lock(tmp_path / "all.lock")
    (tmp_path / "ops.toml").write_text('providers = "rms_norm=native"\n')
    (tmp_path / "classes.toml").write_text('providers = "communicator=native"\n')
    quarantine.confine(Provider("acme", "1.0"), "it crashed")
    record = Path(os.environ["XDG_STATE_HOME"]) / "opgraft/quarantine/acme.json"
    record.rename(tmp_path / "quarantine.json")
    environ = {
        **os.environ,
        "PYTHONPATH": str(site.folder),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    command = [python, str(tmp_path / "program.py"), *arguments]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()


ACTIVE, KERNEL, FILES = (
    "acme 1.0, activated",
    "Acme.forward_oot of acme 1.0",
    r"1.0, files with the SHA-256 \w{12}",
)
OURS = r"RMSNorm.forward_\w+ of \S+ \S+"
ROWS = {
    "selection": ("kernel of rms_norm", KERNEL, OURS),
    "plugins": ("plugin acme", ACTIVE, "acme 1.0, rejected"),
    "variable": ("variable OPGRAFT_PROVIDERS", "none", "rms_norm=acme"),
    "lockfile": ("lockfile", "none", r"one of 2 distributions with the SHA-256 \w{16}"),
    "kernel of a file of settings": ("kernel of rms_norm", KERNEL, OURS),
    "class of a file of settings": (
        "class of communicator",
        "acme:AcmeCommunicator of acme 1.0",
        r"\S+:Communicator of \S+ \S+",
    ),
    "version of a plugin": ("plugin acme", ACTIVE, "acme 1.1, activated"),
    "files of a plugin": ("distribution acme", FILES, FILES),
    "version of torch": ("torch", re.escape(str(version_of("torch"))), "99.0"),
    "order of plugins": ("order of plugins", "acme, brix", "brix, acme"),
    "quarantine": ("plugin acme", ACTIVE, "acme 1.0, rejected"),
    "platform": ("platform", "cpu", "simulated"),
}
"""What a worker is told that differs in that way: the subject, what its parent has, and what it has itself."""


def check_answers(answers: dict[str, str]) -> None:
    """One that is alike decides alike, and each that differs stops with what both have decided."""
    assert answers.pop("alike") == "Acme.forward_oot AcmeCommunicator"
    assert answers.keys() == ROWS.keys()
    for way, answer in answers.items():
        subject, theirs, own = ROWS[way]
        told = (
            rf"[:;] {subject} is {theirs} for the process that started it, and {own} for this one"
        )
        assert re.search(
            rf"^AgreementError: process \d+ would compute otherwise .*{told}", answer
        ), answer


@pytest.mark.parametrize(
    "method",
    ["spawn", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fork", "forkserver"))],
)
def test_processes_of_multiprocessing(site, tmp_path: Path, warm_python: str, method: str) -> None:
    """However they are started, they compare what they decide."""
    (line,) = lines_of(site, tmp_path, PARENT, method, python=warm_python)
    check_answers(json.loads(line))


@pytest.mark.slow
def test_a_lockfile_that_no_variable_names(site, tmp_path: Path) -> None:
    """One that a scope of the parent has set holds for workers, wherever its copy lies; others import nothing."""
    same, none, other = lines_of(site, tmp_path, PINNED)
    assert same == "agrees; imported: True"
    lock = r"one of 2 distributions with the SHA-256 [0-9a-f]{16}"
    begins = (
        rf"AgreementError: process \d+ .*: lockfile is {lock} for the process that started it, and "
    )
    assert re.fullmatch(rf"{begins}none for this one\. .*; imported: False", none)
    assert re.fullmatch(
        rf"{begins}one of 0 distributions with .* for this one\. .*; imported: False", other
    )


@pytest.mark.slow
def test_ranks_of_torchrun(site, tmp_path: Path) -> None:
    """A rank that differs stops, while the other one goes on."""
    (line,) = lines_of(site, tmp_path, RANKS)
    check_answers(json.loads(line))


@pytest.mark.slow
def test_an_actor_of_ray(site, tmp_path: Path) -> None:
    """An actor of a cluster that the program started decides alike, or says what differs."""
    pytest.importorskip("ray")
    (line,) = lines_of(site, tmp_path, RAY)
    check_answers(json.loads(line))


def test_a_process_does_not_bind_itself() -> None:
    """The one that shared may decide anew, and what a scope says in a worker is the worker's own."""
    take_back = opgraft.share_decisions()
    with opgraft.set_config(opgraft.OpgraftConfig(providers="rms_norm=native")):
        RMSNorm(4)
    other = dataclasses.replace(read_environment().decision, process="another")
    os.environ[DECISION] = other.to_text()
    opgraft.reset()
    with opgraft.set_config(opgraft.OpgraftConfig(providers="rms_norm=native")):
        RMSNorm(4)
    rows = {
        name: value.replace("RMSNorm.forward_", "RMSNorm.elsewhere_")
        for name, value in other.rows.items()
    }
    os.environ[DECISION] = dataclasses.replace(other, rows=rows).to_text()
    opgraft.reset()
    with pytest.raises(
        AgreementError, match=r"kernel of rms_norm is RMSNorm.elsewhere_.* unset OPGRAFT_DECISION"
    ):
        RMSNorm(4)
    take_back()
    opgraft.reset()
    RMSNorm(4)
    assert host_state().known_environment().decision is None


TEXTS = [
    "{",
    "[]",
    '{"rows": []}',
    '{"rows": {}, "process": "x"}',
    '{"digest": "0", "process": Infinity, "rows": {}}',
]


def test_a_child_that_was_forked_is_another_process() -> None:
    """Numbers of processes are no identity: the first of each container has the same."""
    before = host_state().identity
    opgraft.reset()
    assert host_state().identity == before
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write_end, host_state().identity.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 100).decode() != before
    os.close(read_end)
    os.close(write_end)


def test_decisions_of_which_a_part_is_lost() -> None:
    """A digest tells."""
    text = SharedDecision("another", {"a": "1", "b": "2"}).to_text()
    assert read_environment({DECISION: text}).decision == SharedDecision(
        "another", {"a": "1", "b": "2"}
    )
    with pytest.raises(ConfigError, match=r"is nothing that opgraft\.share_decisions wrote"):
        read_environment({DECISION: text.replace(', "b": "2"', "")})


@pytest.mark.parametrize("text", TEXTS)
def test_a_variable_that_somebody_else_wrote(text: str) -> None:
    """What ``share_decisions`` did not write is an error that names the variable."""
    with pytest.raises(
        ConfigError, match=r"OPGRAFT_DECISION=.* is nothing that opgraft\.share_decisions wrote"
    ):
        read_environment({DECISION: text})
