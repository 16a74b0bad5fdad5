"""Workers decide as the process that started them, however they are started, or stop with both decisions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import opgraft
import pytest
from opgraft.environment import DECISION, read_environment
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
    shared = os.environ[DECISION]
    os.environ[DECISION] = shared.replace(f'"process": {os.getpid()}', '"process": 1')
    opgraft.reset()
    with opgraft.set_config(opgraft.OpgraftConfig(providers="rms_norm=native")):
        RMSNorm(4)
    os.environ[DECISION] = os.environ[DECISION].replace("RMSNorm.forward_", "RMSNorm.elsewhere_")
    opgraft.reset()
    with pytest.raises(AgreementError, match=r"kernel of rms_norm is RMSNorm.elsewhere_.* unset OPGRAFT_DECISION"):
        RMSNorm(4)
    take_back()
    opgraft.reset()
    RMSNorm(4)
    assert host_state().known_environment().decision is None


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"rows": {}, "process": "x"}'])
def test_a_variable_that_somebody_else_wrote(text: str) -> None:
    """What ``share_decisions`` did not write is an error that names the variable."""
    with pytest.raises(ConfigError, match=r"OPGRAFT_DECISION=.* is nothing that opgraft\.share_decisions wrote"):
        read_environment({DECISION: text})
