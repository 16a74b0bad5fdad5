"""The platforms of ``torch.cuda``: what they answer without a device, forking, and a real GPU where there is one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from opgraft.platform import effective_chain
from opgraft.platforms.cuda.platform import CudaPlatform
from opgraft.platforms.rocm.platform import RocmPlatform
from opgraft.plugins.selection import current_platform
from opgraft.testing.plugin_checks import check_streams

FORK = """
import os, sys, torch
from opgraft.platforms.{name}.platform import {class_name} as PlatformClass
platform = PlatformClass()
asked = [getattr(platform, name) for name in
         ("name", "device_type", "dispatch_chain", "distributed_backend", "compile_backend", "visibility_variable",
          "graph_class", "streams")]
platform.default_config(), platform.device_count(), platform.manual_seed(7)
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    try:
        right = torch.equal(torch.ones(3, device="{device}") + 1, torch.full((3,), 2.0, device="{device}"))
        os._exit(0 if right else 1)
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def fork(name: str, class_name: str, device: str, python: str = sys.executable) -> None:
    """Ask a platform everything that takes no device index, fork, and compute in the child."""
    code = FORK.format(name=name, class_name=class_name, device=device)
    child = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_a_process_may_fork_after_asking_a_platform(name: str, warm_python: str) -> None:
    """Creating a platform and asking what it is leaves no device context behind that a forked child would trip over."""
    fork(name, f"{name.title()}Platform", "cpu", warm_python)


@pytest.mark.parametrize(
    ("platform", "chain", "variable"),
    [
        (CudaPlatform(), ("oot", "cuda", "native"), "CUDA_VISIBLE_DEVICES"),
        (RocmPlatform(), ("oot", "hip", "cuda", "native"), "HIP_VISIBLE_DEVICES"),
    ],
    ids=["cuda", "rocm"],
)
def test_what_needs_no_device(platform, chain: tuple[str, ...], variable: str) -> None:
    """What the platforms are is known without hardware."""
    assert platform.device_type == "cuda"
    assert effective_chain(platform) == chain
    assert (platform.distributed_backend, platform.compile_backend) == ("nccl", "inductor")
    assert platform.visibility_variable == variable
    assert platform.graph_class is torch.cuda.CUDAGraph
    assert platform.streams is torch.cuda


@pytest.mark.parametrize("platform", [CudaPlatform(), RocmPlatform()], ids=["cuda", "rocm"])
def test_devices_are_counted_by_the_probe_until_one_is_in_use(platform, monkeypatch) -> None:
    """PyTorch's own count may start the driver; once the driver is running it is the better one."""
    monkeypatch.setattr(type(platform), "visible_devices", lambda self: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert platform.device_count() == 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert platform.device_count() == 2


def test_memory_and_synchronisation_go_to_the_device_asked_for(monkeypatch) -> None:
    """Methods that take a device index pass it on."""
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 20))
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    memory = CudaPlatform().memory(1)
    CudaPlatform().synchronize(1)
    assert (memory.free, memory.total, asked) == (11, 20, [1])


@pytest.mark.gpu
class TestOnAGpu:
    """With a real GPU, whichever of the two vendors'."""

    def test_it_is_selected(self) -> None:
        """A GPU that torch can use is chosen, and counted as torch counts it."""
        platform = current_platform()
        assert platform.name == ("rocm" if torch.version.hip else "cuda")
        counted = platform.device_count()
        torch.cuda.init()
        assert platform.device_count() == counted

    def test_every_member_answers(self) -> None:
        """Capability, memory, seeding, synchronisation and graphs work on the device."""
        platform = current_platform()
        assert torch.float16 in platform.capability().dtypes
        assert platform.memory().total >= platform.memory().free > 0
        drawn = []
        for _ in range(2):
            platform.manual_seed(7)
            drawn.append(torch.rand(4, device=platform.device_type))
        assert torch.equal(*drawn)
        platform.synchronize()
        x, graph = torch.zeros(4, device=platform.device_type), platform.graph_class()
        with torch.cuda.graph(graph):
            x.add_(1)
        graph.replay()
        platform.synchronize()
        assert x.tolist() == [1, 1, 1, 1]

    def test_streams_keep_their_contract(self) -> None:
        """Work of a stream is in order, and done for whoever waits for it."""
        assert check_streams(current_platform()) is None

    def test_a_child_may_use_the_gpu_after_a_fork(self) -> None:
        """Asking the platform in the parent leaves the GPU usable in a forked child."""
        name = current_platform().name
        fork(name, f"{name.title()}Platform", "cuda")
