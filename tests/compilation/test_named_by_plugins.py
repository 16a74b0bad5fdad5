"""A backend and a pass that come with distributions, named by a plugin or by a platform, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

BACKEND = """
GRAPHS = []

def acme(module, example):
    GRAPHS.append(module)
    return module.forward
"""
TIMES_ONE = """
import torch
from opgraft import GraphPass
from opgraft.compilation.graph_pass import PassOutcome

class TimesOne(GraphPass):
    name = "acme_times_one"

    def run(self, module, model):
        found = [n for n in module.graph.nodes if n.target is torch.ops.aten.mul.Tensor and n.args[1] == 1.0]
        for node in found:
            node.replace_all_uses_with(node.args[0])
        return PassOutcome(len(found), len(found))
"""
NAMES = "CompilationConfig({}cache=True, user_passes=['acme_passes:TimesOne'])"
HOOK = f"""
import opgraft
from opgraft import CompilationConfig, OpgraftConfig
platforms = "any"

@opgraft.hookimpl
def opgraft_config(platform):
    return OpgraftConfig(compilation_config={NAMES.format("backend='acme', ")})
"""
PLATFORM = f"""
from opgraft import CompilationConfig, OpgraftConfig
from opgraft.platforms.cpu.platform import CpuPlatform

class Device(CpuPlatform):
    name = "acme"
    dispatch_chain = ("native",)
    compile_backend = "acme"

    def default_config(self):
        return OpgraftConfig(compilation_config={NAMES.format("")})
"""
USE = """
import json
import acme_backend
import opgraft
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.map = nn.RMSNorm(16, eps=1e-5), nn.Linear(16, 8)

    def forward(self, x):
        return self.map(self.norm(x) * 1.0)

model = Model().eval().requires_grad_(False)
opgraft.graft(model)
compiled = opgraft.compile(model, args=(torch.randn(4, 16),))
for size in (1, 2, 9):
    x = torch.randn(size, 16)
    torch.testing.assert_close(compiled(x), model(x))
told = [[each.name, each.matched, each.replaced] for each in compiled.passes]
at_level_1 = opgraft.compile(model, opgraft.CompilationConfig(level=1), args=(torch.randn(4, 16),))
graphs = len(acme_backend.GRAPHS)
stock = opgraft.CompilationConfig(mode=opgraft.CompilationMode.STOCK_TORCH_COMPILE)
torch.testing.assert_close(opgraft.compile(model, stock)(x), model(x))
assert len(acme_backend.GRAPHS) == graphs + 1
assert opgraft.compile(model, opgraft.CompilationConfig(level=0)) is model
torch.testing.assert_close(torch.compile(model, backend="acme", fullgraph=True)(x), model(x))
assert len(acme_backend.GRAPHS) == graphs + 2
print(json.dumps([compiled.decision.chosen, told[-1], at_level_1.decision.chosen, graphs]))
"""


@pytest.mark.parametrize("by", ["plugin", "platform"])
def test_a_backend_and_a_pass_of_a_plugin(by: str, site: Any, warm_python: str) -> None:
    """A plugin that compiles names its backend, an entry point of torch's, and a pass: both run where no setting says
    otherwise. A platform does by its own defaults; a level that says another backend stands above what it prefers.
    Neither keeps the user from a mode that has no passes, or a backend whose code no cache keeps. ``torch.compile``
    finds the backend by the same name, and gives it the grafted model as one graph."""
    points = {"torch_dynamo_backends": ["acme = acme_backend:acme"]}
    site.install("acme-compiler", {"acme_backend.py": BACKEND, "acme_passes.py": TIMES_ONE}, points)
    if by == "plugin":
        site.plugin("acme", HOOK)
    else:
        site.platform("acme", probe="return Evidence(True, 'it is there')", platform=PLATFORM)
    environ = {**os.environ, "PYTHONPATH": str(site.folder)}
    ended = subprocess.run(
        [warm_python, "-c", USE], env=environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    level_1 = ("acme", 2) if by == "plugin" else ("eager", 1)
    assert json.loads(ended.stdout) == ["acme", ["acme_times_one", 1, 1], *level_1]
