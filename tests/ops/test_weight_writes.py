"""Whoever writes to a weight, and by whatever way, the next call of a linear layer computes with what it holds now."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
import torch
import torch.nn.functional as F
from opgraft.ops import GatedMLP, Linear
from opgraft.ops.linear import weight_cache
from support.packing import Calls, check, needs_onednn, record_calls
from torch import nn

pytestmark = needs_onednn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return record_calls(monkeypatch)


def trained_by(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> Callable[[nn.Linear], object]:
    """A training step, after which parameters require a gradient again only if they did."""

    def step(op: nn.Linear) -> None:
        before = op.weight.requires_grad
        op.requires_grad_(True)
        optimizer = make(list(op.parameters()))
        with torch.enable_grad():
            op(torch.randn(3, op.in_features)).square().sum().backward()
        optimizer.step()
        op.requires_grad_(before)

    return step


def merged_as_peft_does(op: nn.Linear) -> None:
    """``merge`` of PEFT's LoRA layers, which writes through ``.data``."""
    lora_a, lora_b = torch.randn(2, op.in_features), torch.randn(op.out_features, 2)
    op.weight.data += (lora_b @ lora_a) * 0.5


def merged_safely_and_unmerged_as_peft_does(op: nn.Linear) -> None:
    """``merge(safe_merge=True)``, which assigns ``.data``, then ``unmerge``, which subtracts in place."""
    delta = torch.randn(op.out_features, 2) @ torch.randn(2, op.in_features)
    merged = op.weight.data.clone()
    merged += delta
    op.weight.data = merged
    op(torch.randn(3, op.in_features))
    op.weight.data -= delta * 2


def swapped(op: nn.Linear) -> None:
    other = nn.Parameter(torch.randn_like(op.weight), requires_grad=op.weight.requires_grad)
    torch.utils.swap_tensors(op.weight, other)


def written_by_numpy(op: nn.Linear) -> None:
    op.weight.detach().numpy()[:] *= 3


def written_by_dlpack(op: nn.Linear) -> None:
    torch.from_dlpack(op.weight.detach()).mul_(3)


def double(weight: torch.Tensor) -> None:
    weight.detach().mul_(2)


def written_by_a_process(op: nn.Linear) -> None:
    op.share_memory()
    op(torch.randn(3, op.in_features))
    child = multiprocessing.get_context("fork").Process(target=double, args=(op.weight,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


SEEN_ALWAYS: dict[str, Callable[[nn.Linear], object]] = {
    "AdamW": trained_by(lambda p: torch.optim.AdamW(p, lr=0.5)),
    "AdamW(fused=True)": trained_by(lambda p: torch.optim.AdamW(p, lr=0.5, fused=True)),
    "SGD(fused=True)": trained_by(lambda p: torch.optim.SGD(p, lr=0.5, fused=True)),
    "Adagrad(fused=True)": trained_by(lambda p: torch.optim.Adagrad(p, lr=0.5, fused=True)),
    "torch.utils.swap_tensors": swapped,
    "another process": written_by_a_process,
}
UNSEEN: dict[str, Callable[[nn.Linear], object]] = {
    ".data.copy_": lambda op: op.weight.data.copy_(torch.randn(op.weight.shape)),
    ".data of a view": lambda op: op.weight.view(-1).data.mul_(3),
    "numpy": written_by_numpy,
    "dlpack": written_by_dlpack,
    "PEFT's merge": merged_as_peft_does,
    "PEFT's safe merge and unmerge": merged_safely_and_unmerged_as_peft_does,
}


@pytest.mark.parametrize("write", [*SEEN_ALWAYS, *UNSEEN])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("again", [1, 2])
def test_written(calls: Calls, write: str, requires_grad: bool, again: int) -> None:
    """A layer whose weight nobody declared frozen reads it at each call, whether or not it requires a gradient."""
    op, x = Linear(13, 7).requires_grad_(requires_grad), torch.randn(3, 13)
    with torch.no_grad():
        check(op(x), x, op)
        for _ in range(again):
            before = op.weight.detach().clone()
            (SEEN_ALWAYS | UNSEEN)[write](op)
            assert not torch.equal(op.weight, before)
            check(op(x), x, op)
    assert "pack" not in calls
    assert "linear" in calls


def transposed_in_place(op: nn.Linear) -> None:
    op.weight.requires_grad_(False).t_()


def transposed_data(op: nn.Linear) -> None:
    op.weight.data = op.weight.data.t()


def strided(op: nn.Linear) -> None:
    op.weight.data = op.weight.data.as_strided((13, 13), (0, 1))


RESHAPING: dict[str, Callable[[nn.Linear], object]] = {
    "t_": transposed_in_place,
    ".data = .data.t()": transposed_data,
    ".data = .data.as_strided": strided,
}


@pytest.mark.parametrize("write", [*SEEN_ALWAYS, *UNSEEN, *RESHAPING])
@pytest.mark.parametrize("child", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("frozen", [True, False])
def test_joint_layer_written(calls: Calls, write: str, child: str, frozen: bool) -> None:
    """Gate and up side by side, both square, are read at each call too; frozen, what nobody sees needs ``refresh``."""
    layer, x = GatedMLP(13, 13).eval().requires_grad_(False), torch.randn(3, 13)
    layer.join()
    if frozen:
        opgraft.freeze(layer)
    part = layer.get_submodule(child)
    with torch.no_grad():
        agrees(layer, x)
        before = part.weight.detach().clone()
        (SEEN_ALWAYS | UNSEEN | RESHAPING)[write](part)
        assert not torch.equal(part.weight, before)
        if frozen and write in UNSEEN:
            opgraft.refresh(layer)
        agrees(layer, x)


@pytest.mark.parametrize("frozen", [True, False])
def test_pruned_joint_layer(frozen: bool) -> None:
    """Structured pruning by ``.data`` cuts rows of gate and up, and columns of down, as it does in a plain model."""
    layer, x = GatedMLP(13, 12).eval().requires_grad_(False), torch.randn(3, 13)
    layer.join()
    if frozen:
        opgraft.freeze(layer)
    agrees(layer, x)
    for name in layer.joined:
        layer.get_submodule(name).weight.data = layer.get_submodule(name).weight.data[:5]
    layer.down_proj.weight.data = layer.down_proj.weight.data[:, :5].contiguous()
    agrees(layer, x)


@torch.no_grad()
def agrees(layer: GatedMLP, x: torch.Tensor) -> None:
    gate, up, down = (layer.get_submodule(name).weight for name in (*layer.joined, "down_proj"))
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("write", SEEN_ALWAYS)
def test_frozen_and_written(calls: Calls, write: str) -> None:
    """Training a frozen layer, sharing its memory or swapping its tensors takes the declaration back."""
    op, x = Linear(13, 7), torch.randn(3, 13)
    opgraft.freeze(op)
    check(op(x), x, op)
    assert calls == ["pack", "linear"]
    SEEN_ALWAYS[write](op)
    check(op(x), x, op)
    assert calls.count("pack") == 1


@pytest.mark.parametrize("write", UNSEEN)
def test_frozen_and_refreshed(calls: Calls, write: str) -> None:
    """What nobody can see needs ``refresh`` in a frozen layer, or ``freeze`` once more, as the docs say."""
    op, x = Linear(13, 7), torch.randn(3, 13)
    for declare in (opgraft.refresh, opgraft.freeze):
        opgraft.freeze(op)
        op(x)
        UNSEEN[write](op)
        declare(op)
        check(op(x), x, op)


def test_training_and_evaluating_in_turns(calls: Calls) -> None:
    """Evaluations between the steps of the Trainer's default optimizer see the weights of their time, frozen or not."""
    model, x = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 7)), torch.randn(9, 13)
    opgraft.graft(model)
    up, down = model[0], model[2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for turn in range(4):
        if turn == 2:
            opgraft.freeze(model.eval())
        with torch.no_grad():
            reference = torch.relu(x @ up.weight.T + up.bias) @ down.weight.T + down.bias
            torch.testing.assert_close(model.eval()(x), reference, atol=1e-5, rtol=1e-5)
        model.train().requires_grad_(True)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        model.requires_grad_(False)
    assert "pack" in calls


def test_requiring_a_gradient_takes_the_declaration_back(calls: Calls) -> None:
    """A weight that was trained out of sight, and frozen by torch's own switch afterwards, is read as it is."""
    op, x = Linear(13, 7), torch.randn(3, 13)
    opgraft.freeze(op)
    op(x)
    assert not op.weight.requires_grad
    op.requires_grad_(True)
    with torch.no_grad():
        op(x)
        op.requires_grad_(False)
        op.weight.data.mul_(3)
    check(op(x), x, op)


def test_what_cannot_be_declared() -> None:
    """Weights elsewhere or made in inference mode are left without copies, and other things are refused."""
    with torch.inference_mode():
        weight = nn.Parameter(torch.randn(3, 3), requires_grad=False)
    opgraft.freeze(weight)
    opgraft.freeze(nn.Linear(3, 3, device="meta"))
    assert weight_cache.declaration(weight) == 0
    with pytest.raises(TypeError, match="freeze"):
        opgraft.freeze("a model")  # type: ignore[arg-type]


ALIASES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "tied": lambda weight: weight,
    "view": lambda weight: weight[:2],
    "detach": lambda weight: weight.detach(),
    ".data": lambda weight: weight.data,
    "parameter": lambda weight: nn.Parameter(weight.data, requires_grad=False),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_are_frozen_with_a_weight(calls: Calls, alias: str) -> None:
    """The declaration holds for memory; torch counts writes through views, others are told by ``refresh``."""
    op, x = Linear(13, 7), torch.randn(3, 13)
    opgraft.freeze(op)
    op(x)
    other = ALIASES[alias](op.weight)
    assert weight_cache.declaration(other) == weight_cache.declaration(op.weight) != 0
    other.mul_(2)
    if alias in (".data", "parameter"):
        opgraft.refresh(other)
    check(op(x), x, op)
    opgraft.thaw(other)
    assert weight_cache.declaration(op.weight) == 0


def test_an_alias_that_requires_a_gradient_thaws(calls: Calls) -> None:
    """A parameter that is trained over the memory of a frozen one takes the declaration back at its first call."""
    op, x = Linear(13, 7), torch.randn(3, 13)
    opgraft.freeze(op)
    other = Linear(13, 7)
    other.weight = nn.Parameter(op.weight.data)
    other(x)
    assert weight_cache.declaration(op.weight) == 0


COLLECTIVES = """
import sys
import pytest, torch
from opgraft.ops import GatedMLP, Linear
from support.packing import check, record_calls
from torch import distributed

rank, name, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with pytest.MonkeyPatch.context() as patch, torch.no_grad():
    calls = record_calls(patch)
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(rank)
    op, x = Linear(13, 7), torch.randn(3, 13)
    check(op(x), x, op)
    before = op.weight.clone()
    if name == "all_reduce":
        distributed.all_reduce(op.weight)
    else:
        distributed.broadcast(op.weight, src=1)
    check(op(x), x, op)
    print(torch.equal(before, op.weight), "linear" in calls, "pack" in calls)
    distributed.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_collectives(tmp_path: Path, name: str, warm_python: str) -> None:
    """What two processes sum or send into a parameter is what it computes with."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "OPGRAFT_PLUGINS": "",
    }
    commands = [
        [warm_python, "-c", COLLECTIVES, str(rank), name, str(tmp_path / "store")]
        for rank in range(2)
    ]
    ranks = [
        subprocess.Popen(each, env=environment, text=True, stdout=subprocess.PIPE)
        for each in commands
    ]
    said = [process.communicate(timeout=120)[0].split() for process in ranks]
    assert said == [["False", "True", "False"], [str(name == "broadcast"), "True", "False"]]
