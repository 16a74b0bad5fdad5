"""Files, copies, moves and assignments of linear layers without plain weights: nothing is lost on the way."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import opgraft
import pytest
import torch
from opgraft.compat import packed_linear as onednn
from support.packing import DTYPES, check, make, needs_onednn, packed, record_calls, same_bits
from torch import Tensor, nn

pytestmark = needs_onednn


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    record_calls(monkeypatch)


def test_files_and_copies() -> None:
    """A state_dict has the keys and bits of the plain layer; copies and files are packed with weights of their own."""
    op, plain = packed()
    states = op.state_dict(), plain.state_dict()
    assert [list(state) for state in states] == [["weight", "bias"]] * 2
    assert all(same_bits(states[0][name], states[1][name]) for name in states[1])
    assert not any(isinstance(value, nn.Parameter) for value in states[0].values())
    assert isinstance(op.state_dict(keep_vars=True)["weight"], nn.Parameter)
    file = io.BytesIO()
    torch.save(op, file)
    file.seek(0)
    for copied in (
        copy.deepcopy(op),
        copy.copy(op),
        pickle.loads(pickle.dumps(op)),  # noqa: S301  # our own bytes
        torch.load(file, weights_only=False),
    ):
        assert copied._packed is not op._packed
        assert "weight" not in copied._parameters
        assert same_bits(copied.weight, plain.weight)
        opgraft.thaw(copied)
        assert type(copied) is type(plain)
        assert same_bits(copied.weight, plain.weight)
    assert "weight" not in op._parameters


@pytest.mark.parametrize("assign", [False, True])
def test_loading(assign: bool) -> None:
    """What is copied is packed, what is assigned stays plain; what does not fit is reported as by the plain layer."""
    op, plain = packed()
    given = make()
    op.load_state_dict(given.state_dict(), assign=assign)
    assert same_bits(op.weight, given.weight)
    assert ("weight" in op._parameters) == assign
    opgraft.freeze(op, keep_plain=False)
    for state in (
        {"bias": given.bias},
        {**given.state_dict(), "other": given.bias},
        {"weight": torch.randn(2, 2), "bias": given.bias},
    ):
        messages = []
        for layer in (op, plain):
            with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict") as error:
                layer.load_state_dict(state, assign=assign)
            messages.append(str(error.value).partition("\n")[2])
        assert messages[0] == messages[1]
    assert op.load_state_dict({}, strict=False).missing_keys == ["weight", "bias"]
    assert same_bits(op.weight, given.weight)


def test_moves() -> None:
    """What cannot be packed is a parameter, and is packed again when it can be; values round as a plain layer's do."""
    op, plain = packed()
    for dtype in [torch.float16, torch.float32, torch.float64, *DTYPES, torch.float32]:
        op.to(dtype)
        plain.to(dtype)
        x = torch.randn(3, 13).to(dtype)
        assert ("weight" in op._parameters) == (dtype not in DTYPES)
        assert list(op.state_dict()) == list(plain.state_dict())
        assert same_bits(op.weight, plain.weight)
        torch.testing.assert_close(op(x), plain(x))
    op.to("meta")
    assert op.weight.is_meta
    op.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert "weight" not in op._parameters
    assert same_bits(op.weight, plain.weight)
    op.double()
    opgraft.thaw(op)
    assert type(op) is type(plain)
    assert op.weight.dtype == torch.float64


def test_nothing_is_lost_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a conversion, or oneDNN, raises in the middle, the layer has the weight that it had."""
    op, plain = packed()

    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        op._apply(fail)
    assert same_bits(op.weight, plain.weight)
    with monkeypatch.context() as patch:
        patch.setattr(onednn, "pack", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            op.float()
    assert same_bits(op.weight, plain.weight)
    assert same_bits(op(x := torch.randn(3, 13)), plain(x))


def test_assigning() -> None:
    """A parameter that is assigned is that very one until it is packed; what is none is refused, and nothing lost."""
    op, embedding = packed()[0], nn.Embedding(7, 13)
    op.weight = embedding.weight
    with torch.no_grad():
        embedding.weight.mul_(2)
    assert op.weight is embedding.weight
    check(op(x := torch.randn(3, 13)), x, op)
    given = embedding.weight.detach().clone()
    assert opgraft.freeze(op, keep_plain=False).kept == ()
    assert "weight" not in op._parameters
    for size in ((7, 0), (0, 13)):
        op.weight = nn.Parameter(torch.empty(size))
        assert opgraft.freeze(op, keep_plain=False).kept[0].reason == "it is empty"
    op.weight = nn.Parameter(given)
    opgraft.freeze(op, keep_plain=False)
    with pytest.raises(
        TypeError, match=r"cannot assign 'torch\.FloatTensor' as parameter 'weight'"
    ):
        op.weight = torch.randn(7, 13)
    assert same_bits(op.weight, given)
    opgraft.thaw(op)
    assert op.weight.requires_grad


def test_what_is_trained_is_not_packed_again() -> None:
    """A layer that became plain and is trained keeps the parameter that its optimizer has, whatever it is moved to."""
    op = packed()[0].half()
    optimizer = torch.optim.SGD(op.train().parameters(), 0.1)
    op.float()
    assert op.weight is optimizer.param_groups[0]["params"][0]
    op.eval().float()
    assert "weight" not in op._parameters


def test_copying_takes_one_plain_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep copy of a model rebuilds each plain weight once, and lets go of it before the next."""
    model = nn.Sequential(*(packed()[0] for _ in range(4)))
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = []
    rebuild = onednn.unpack

    def rebuilding(weight: Tensor) -> Tensor:
        gc.collect()
        most.append(len(alive))
        alive.add(rebuilt := rebuild(weight))
        return rebuilt

    monkeypatch.setattr(onednn, "unpack", rebuilding)
    copied = copy.deepcopy(model)
    assert most == [0, 0, 0, 0]
    assert copied[0]._packed is not model[0]._packed
    shared = nn.ModuleList([model[0], model[0]])
    assert (twice := copy.deepcopy(shared))[0] is twice[1]
