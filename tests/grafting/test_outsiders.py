"""Code that takes hold of a grafted model, or watches it: it works, or is told what to do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import graft, ungraft
from opgraft.errors import GraftError
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.dense(x))
        return out


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook]
)
def test_hooks_of_every_module_are_called_for_each_layer(register: Callable[..., Any]) -> None:
    """A hook that torch calls for every module of the process sees gate, up and act, as in the plain model."""
    model, x = nn.Sequential(Gated(), Intermediate()).eval(), torch.randn(2, 8)
    names = {module: name for name, module in model.named_modules()}
    called: list[Any] = []
    with torch.no_grad():
        handle = register(lambda module, *_: called.append(names.get(module)))
        model(x)
        expected = sorted(called)
        handle.remove()
        graft(model)
        names = {module: name for name, module in model.named_modules()}
        model(x)
        called.clear()
        handle = register(lambda module, *_: called.append(names.get(module)))
        try:
            model(x)
        finally:
            handle.remove()
    assert expected == sorted(called)
    assert {"0.gate", "0.up", "0.act", "1.act"} < {*called}


@pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization", "ignore:.*quantiz", "ignore:.*TypedStorage"
)
def test_quantize_dynamic_after_ungraft_and_before_graft() -> None:
    """Both orders that the note of the report names work."""
    quantize = torch.ao.quantization.quantize_dynamic
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    graft(model)
    ungraft(model)
    quantized = quantize(model, {nn.Linear})
    expected = quantized(torch.ones(2, 8))
    assert type(quantized[0]) is not nn.Linear
    report = graft(quantized)
    assert [row.source for row in report.replaced] == ["LayerNorm"]
    torch.testing.assert_close(quantized(torch.ones(2, 8)), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_torchscript_says_what_to_do(mlp) -> None:
    """torch.jit.script names the op and the way out, and the model is as it was."""
    model = mlp()
    graft(model)
    modules = [*model.modules()]
    with pytest.raises(
        GraftError, match=r"cannot compile the op LayerNorm.*opgraft\.ungraft\(model\) first"
    ):
        torch.jit.script(model)
    assert [*model.modules()] == modules
    ungraft(model)
    x = torch.randn(2, 16)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("gradient", [False, True])
def test_nested_tensors(layout: torch.layout, gradient: bool) -> None:
    """Rows of several lengths go through as they go through torch's own modules."""
    layers = [
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.GELU(),
        nn.Linear(8, 8, bias=False),
        nn.SiLU(),
        Intermediate(),
    ]
    model = nn.Sequential(*layers, *([Gated()] if layout is torch.strided else [])).eval()
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
    with torch.set_grad_enabled(gradient):
        expected = model(x).unbind()
        graft(model)
        found = model(x).unbind()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


DISTRIBUTED = """
import sys
import torch
import torch.distributed as dist
from opgraft import graft, ungraft
from opgraft.errors import GraftError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))

def refused(model, words):
    modules = [*model.modules()]
    try:
        ungraft(model)
    except GraftError as error:
        assert words in str(error), error
    else:
        raise AssertionError("it was not refused")
    assert [*model.modules()] == modules

torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh, x = init_device_mesh("cpu", (1,)), torch.randn(2, 8)
model = nn.Sequential(Block(), Block())
state, expected = model.state_dict(), model(x)

graft(model)
for part in (*model, model):
    fully_shard(part, mesh=mesh)
torch.testing.assert_close(model(x), expected)
ungraft(model)
torch.testing.assert_close(model(x), expected)
model(x).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
assert not torch.allclose(model(x), expected)

model = nn.Sequential(Block(), Block())
model.load_state_dict(state)
graft(model)
fully_shard(model[0].up, mesh=mesh)
refused(model, "was given the class FSDPLinear by other code")

model = nn.Sequential(Block(), Block())
graft(model)
parallelize_module(model, mesh, {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})
refused(model, "the weight is a DTensor of Linear")

model = nn.Sequential(Block(), Block())
model.load_state_dict(state)
parallelize_module(model, mesh, {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})
reasons = {row.path: row.reason for row in graft(model).left_alone}
assert reasons == dict.fromkeys(["0.up", "0.down"], "its weight is a DTensor, which kernels may not take"), reasons
torch.testing.assert_close(model(x), expected)
ungraft(model)
torch.testing.assert_close(model(x), expected)
dist.destroy_process_group()
"""


def test_sharded_and_parallelized_models(tmp_path, warm_python) -> None:
    """Sharded by layers, a model is ungrafted and goes on; where ops themselves were changed, ungraft refuses."""
    done = subprocess.run(
        [warm_python, "-c", DISTRIBUTED, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
