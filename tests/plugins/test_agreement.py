"""Workers decide as the process that started them, however they are started, or stop with both decisions."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import opgraft
import pytest
from opgraft.environment import DECISION, SharedDecision, read_environment
from opgraft.errors import AgreementError, ConfigError
from opgraft.ops import RMSNorm
from opgraft.state import host_state

PARENT = """
import multiprocessing, os, sys
import opgraft
from opgraft.ops import RMSNorm
def work(out):
    for variables in ({}, {"OPGRAFT_CUSTOM_OPS": "-rms_norm"}, {"OPGRAFT_PLUGINS": ""}):
        os.environ.update(variables)
        opgraft.reset()
        try:
            out.put(str(RMSNorm(4).binding.kernel.winner))
        except opgraft.OpgraftError as error:
            out.put(f"{type(error).__name__}: {error}")
if __name__ == "__main__":
    opgraft.share_decisions()
    context = multiprocessing.get_context(sys.argv[1])
    out = context.Queue()
    process = context.Process(target=work, args=(out,))
    process.start()
    for _ in range(3):
        print(out.get())
    process.join()
"""
PINNED = """
import multiprocessing, os, sys
from pathlib import Path
import opgraft
from opgraft.plugins.locking import lock_installed, write_rows
from opgraft.state import host_state
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
    context = multiprocessing.get_context(sys.argv[1])
    out = context.Queue()
    process = context.Process(target=work, args=(out,))
    process.start()
    for _ in range(3):
        print(out.get())
    process.join()
"""
RANKS = """
import os, subprocess, sys
import opgraft
from opgraft.ops import RMSNorm
if "RANK" not in os.environ:
    opgraft.share_decisions()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    sys.exit(subprocess.run(torchrun).returncode)
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os.environ["OPGRAFT_CUSTOM_OPS"] = "-rms_norm"
try:
    answer = RMSNorm(4).binding.kernel.winner
except opgraft.OpgraftError as error:
    both = [kernel in str(error) for kernel in ("Acme.forward_oot", "RMSNorm.forward_native")]
    answer = f"{type(error).__name__} {all(both)}"
# One write each: the ranks share a pipe, and without buffers print writes a line in pieces.
sys.stdout.write(f"{dist.get_rank()} {answer}\\n")
dist.barrier()
dist.destroy_process_group()
"""
RAY = """
import os
import opgraft, ray
from opgraft.ops import RMSNorm
opgraft.share_decisions()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
@ray.remote(num_cpus=0)
class Actor:
    def work(self, **variables):
        import os
        import opgraft
        from opgraft.ops import RMSNorm
        os.environ.update(variables)
        opgraft.reset()
        try:
            return str(RMSNorm(4).binding.kernel.winner)
        except opgraft.OpgraftError as error:
            return f"{type(error).__name__}: {error}"
actor = Actor.remote()
print(ray.get(actor.work.remote()))
print(ray.get(actor.work.remote(OPGRAFT_CUSTOM_OPS="-rms_norm")))
ray.shutdown()
"""
PLUGIN = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
class Acme(RMSNorm):
    def forward_oot(self, x, residual=None):
        return self.forward_native(x, residual)
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(Acme)
"""


def lines_of(site, tmp_path: Path, source: str, *arguments: str) -> list[str]:
    """What a program prints that sees the distributions of ``site``, among which is a plugin."""
    site.plugin("acme", PLUGIN)
    (tmp_path / "program.py").write_text(source)
    environ = {**os.environ, "PYTHONPATH": str(site.folder), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [sys.executable, str(tmp_path / "program.py"), *arguments]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_multiprocessing(site, tmp_path: Path, method: str) -> None:
    """A worker with the same environment decides alike; with other kernels or plugins it stops and shows both."""
    same, kernel, plugins = lines_of(site, tmp_path, PARENT, method)
    assert same == "Acme.forward_oot"
    assert kernel.startswith("AgreementError: process ")
    assert (
        "kernel of rms_norm is Acme.forward_oot of acme 1.0 for the process that started it, and "
        "RMSNorm.forward_native of opgraft "
    ) in kernel
    assert "plugin acme is acme 1.0, activated for the process that started it, and acme 1.0, rejected for" in plugins


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_lockfile_that_no_variable_names(site, tmp_path: Path, method: str) -> None:
    """One that a scope of the parent has set holds for workers, wherever its copy lies; others import nothing."""
    same, none, other = lines_of(site, tmp_path, PINNED, method)
    assert same == "agrees; imported: True"
    lock = r"one of 1 distributions with the SHA-256 [0-9a-f]{16}"
    begins = rf"AgreementError: process \d+ .*: lockfile is {lock} for the process that started it, and "
    assert re.fullmatch(rf"{begins}none for this one\. .*; imported: False", none)
    assert re.fullmatch(rf"{begins}one of 0 distributions with .* for this one\. .*; imported: False", other)


def test_ranks_of_torchrun(site, tmp_path: Path) -> None:
    """The rank that would run another kernel stops with both, the other one goes on."""
    lines = lines_of(site, tmp_path, RANKS)
    assert sorted(lines) == ["0 Acme.forward_oot", "1 AgreementError True"]


@pytest.mark.slow
def test_an_actor_of_ray(site, tmp_path: Path) -> None:
    """An actor of a cluster that the program started decides alike, or says what differs."""
    pytest.importorskip("ray")
    same, other = lines_of(site, tmp_path, RAY)
    assert same == "Acme.forward_oot"
    assert "AgreementError" in other
    assert "kernel of rms_norm is Acme.forward_oot of acme 1.0" in other


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
    rows = {name: value.replace("RMSNorm.forward_", "RMSNorm.elsewhere_") for name, value in other.rows.items()}
    os.environ[DECISION] = dataclasses.replace(other, rows=rows).to_text()
    opgraft.reset()
    with pytest.raises(AgreementError, match=r"kernel of rms_norm is RMSNorm.elsewhere_.* unset OPGRAFT_DECISION"):
        RMSNorm(4)
    take_back()
    opgraft.reset()
    RMSNorm(4)
    assert host_state().known_environment().decision is None


TEXTS = ["{", "[]", '{"rows": []}', '{"rows": {}, "process": "x"}', '{"digest": "0", "process": Infinity, "rows": {}}']


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
    assert read_environment({DECISION: text}).decision == SharedDecision("another", {"a": "1", "b": "2"})
    with pytest.raises(ConfigError, match=r"is nothing that opgraft\.share_decisions wrote"):
        read_environment({DECISION: text.replace(', "b": "2"', "")})


@pytest.mark.parametrize("text", TEXTS)
def test_a_variable_that_somebody_else_wrote(text: str) -> None:
    """What ``share_decisions`` did not write is an error that names the variable."""
    with pytest.raises(ConfigError, match=r"OPGRAFT_DECISION=.* is nothing that opgraft\.share_decisions wrote"):
        read_environment({DECISION: text})
