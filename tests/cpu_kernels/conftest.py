"""The plugin opgraft-cpu-kernels, built and installed by pip into a folder that only these tests have on their path."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft.ops.spec import OpSpec
from support.built_kernels import built


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the installed plugin. A build is kept for the next session and shared by processes."""
    if not shutil.which("g++"):
        pytest.skip("no g++ to build the kernels with")
    return built(tmp_path_factory.mktemp("cpu-kernels"))


@pytest.fixture
def plugin(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin where the host finds it. Its modules stay imported: torch takes the rules of an op once."""
    monkeypatch.syspath_prepend(str(installed))
    opgraft.reset()
    return installed


@pytest.fixture
def kernels(plugin: Path) -> Iterator[object]:
    """The torch ops of the plugin; the path in force is restored."""
    import opgraft_cpu_kernels

    assert opgraft_cpu_kernels.missing() is None
    before = opgraft_cpu_kernels.path()
    yield torch.ops.opgraft_cpu_kernels
    opgraft_cpu_kernels.set_path(before)


@pytest.fixture(params=["amx", "avx512_bf16", "avx512", "avx2", "scalar"])
def path(kernels: object, request: pytest.FixtureRequest) -> str:
    """Each path, forced."""
    import opgraft_cpu_kernels

    name: str = request.param
    if name not in opgraft_cpu_kernels.paths():
        pytest.skip(f"this CPU lacks {name}")
    opgraft_cpu_kernels.set_path(name)
    return name


@pytest.fixture
def sized(path: str) -> Callable[[OpSpec], OpSpec]:
    """Leaves the realistic sizes of a spec to the path of this CPU: the sharing among threads is the same on each."""
    import opgraft_cpu_kernels

    return lambda spec: (
        spec if path == opgraft_cpu_kernels.paths()[0] else dataclasses.replace(spec, large=())
    )
