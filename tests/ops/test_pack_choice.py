"""Which weights are packed, which stay plain, and what the report says of both."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import opgraft
import pytest
import torch
from opgraft.binding.specialisation import enforced
from opgraft.compat import packed_linear as onednn
from opgraft.errors import PackError
from opgraft.ops import GatedMLP, Linear
from opgraft.ops.composites.composite import served_by
from opgraft.ops.freezing import PackedLinear
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.weight_cache import declaration
from support.packing import Calls, check, make, needs_onednn, record_calls, use_tables
from torch import nn
from torch.nn.utils import parametrizations, parametrize

pytestmark = needs_onednn


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return record_calls(monkeypatch)


def switched_off() -> AbstractContextManager[object]:
    compilation = opgraft.CompilationConfig(custom_ops=["-linear"])
    return opgraft.set_config(opgraft.OpgraftConfig(compilation_config=compilation))


def model_of(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).eval()


def state_of(model: nn.Module) -> dict[str, tuple[type, dict[str, int]]]:
    return {
        path: (
            type(module),
            {name: id(parameter) for name, parameter in module._parameters.items()},
        )
        for path, module in model.named_modules()
    }


def _tied(op: Linear) -> nn.Module:
    embedding = nn.Embedding(7, 13)
    op.weight = embedding.weight
    return embedding


def _same_memory(op: Linear) -> nn.Module:
    other = make()
    other.weight.data = op.weight.data
    return other


def _buffer(op: Linear) -> nn.Module:
    other = nn.Module()
    other.register_buffer("seen", op.weight.detach()[:2])
    return other


def _made_for_inference(op: Linear) -> None:
    with torch.inference_mode():
        op.weight = nn.Parameter(torch.randn(7, 13), requires_grad=False)


def _set_data(make_it: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Linear], None]:
    return lambda op: setattr(op.weight, "data", make_it(op.weight.data))


class _Weight(nn.Parameter):
    pass


CHANGES: dict[str, tuple[Callable[[Any], nn.Module | None], str]] = {
    "a tied embedding": (_tied, "it shares memory with 1.weight"),
    "other parameters over its memory": (_same_memory, "it shares memory with 1.weight"),
    "a buffer over a part of it": (_buffer, "it shares memory with 1.seen"),
    "a part of a larger memory": (
        _set_data(lambda w: torch.randn(9, 13)[1:8]),
        "it is part of a larger memory",
    ),
    "strides": (_set_data(lambda w: torch.randn(13, 7).t()), "it is strided, (1, 7)"),
    "an inference tensor": (_made_for_inference, "it was made in inference mode"),
    "float16": (lambda op: op.half() and None, "oneDNN packs no torch.float16 here"),
    "float64": (lambda op: op.double() and None, "oneDNN packs no torch.float64 here"),
    "the meta device": (
        lambda op: op.to("meta") and None,
        "it is no matrix in the memory of the CPU",
    ),
    "memory that processes share": (
        lambda op: op.share_memory() and None,
        "processes share its memory",
    ),
    "a gradient": (
        lambda op: setattr(op.requires_grad_(True).weight, "grad", torch.ones(7, 13)),
        "it has a gradient, or hooks that wait for one",
    ),
    "a hook for its gradient": (
        lambda op: op.requires_grad_(True).weight.register_hook(lambda g: g) and None,
        "it has a gradient, or hooks that wait for one",
    ),
    "a class of its own": (
        lambda op: setattr(op, "weight", _Weight(op.weight.data)),
        "it is a _Weight, expected",
    ),
    "a parametrization": (
        lambda op: parametrizations.weight_norm(op) and None,
        "its class was derived from the op by other code, such as a parametrization",
    ),
    "a forward on the instance": (
        lambda op: setattr(op, "forward", lambda x: x),
        "its forward was set on the instance",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_stays_plain(change: str) -> None:
    """Weights that others may see, or that cannot be packed, stay as they are, each with its reason."""
    alter, reason = CHANGES[change]
    op, last = make(), make()
    other = alter(op)
    model = model_of(op, *filter(None, [other]), last)
    before = state_of(model)
    report = opgraft.freeze(model, keep_plain=False)
    after = state_of(model)
    rows = {row.path: row.reason for row in report.kept}
    assert rows["0"].startswith(reason)
    assert [row.path for row in report.packed] == [str(len(model) - 1)]
    assert {
        path: state for path, state in after.items() if path not in ("", str(len(model) - 1))
    } == {path: state for path, state in before.items() if path not in ("", str(len(model) - 1))}


def test_one_layer_in_several_places_is_packed() -> None:
    """A module that a model calls twice shares its weight with nobody else."""
    op = make()
    model = model_of(op, nn.Identity(), op)
    report = opgraft.freeze(model, keep_plain=False)
    assert ([row.path for row in report.packed], report.kept) == (["0"], ())
    assert model[2] is op


@torch.no_grad()
def test_joint_storages_are_taken_apart() -> None:
    """Gate and up, which one op computes over one storage, are packed one by one, and joined again afterwards."""
    model, x = model_of(GatedMLP(16, 24)), torch.randn(3, 16)
    model.float()
    before, keys = model(x), list(model.state_dict())
    assert model[0].joint_op(x) is not None
    report = opgraft.freeze(model, keep_plain=False)
    assert [row.path for row in report.packed] == ["0.gate_proj", "0.up_proj", "0.down_proj"]
    assert model[0].joint_op(x) is None
    for moved in (model, model.float(), model.double().float()):
        torch.testing.assert_close(moved(x), before)
    opgraft.thaw(model)
    assert model[0].joint_op(x) is not None
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), before)


def _joined() -> tuple[GatedMLP, nn.Sequential]:
    layer = GatedMLP(16, 24, bias=True).eval()
    layer.join()
    return layer, model_of(layer)


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_joint_storages_that_others_see(kind: str, name: str) -> None:
    """Gate and up stay where they are when a third party lies in their memory, and sees what is written to them."""
    layer, model = _joined()
    other, seen = nn.Module(), getattr(layer.gate_proj, name).detach()[:2]
    if kind == "buffer":
        other.register_buffer("seen", seen)
    else:
        other.seen = nn.Parameter(seen, requires_grad=False)
    model.append(other)
    before = addresses(model)
    report = opgraft.freeze(model, keep_plain=False)
    assert [row.path for row in report.packed] == ["0.down_proj"]
    assert {row.reason for row in report.kept} == {"it shares memory with 1.seen"}
    after = addresses(model)
    assert all(after[key] == address for key, address in before.items() if "down_proj" not in key)
    with torch.no_grad():
        assert layer.joint_op(torch.randn(3, 16)) is not None


def test_a_joint_layer_that_stands_elsewhere_too() -> None:
    """A projection that a model has under another name first is packed under that, and so is the one beside it."""
    layer = _joined()[0]
    x = torch.randn(3, 16)
    before = layer(x)
    report = opgraft.freeze(model_of(layer.gate_proj, layer), keep_plain=False)
    assert [row.path for row in report.packed] == ["0", "1.up_proj", "1.down_proj"]
    torch.testing.assert_close(layer(x), before)


def test_nothing_moves_where_packing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while it is decided what to pack leaves all memory where it is; so does packing that never pays."""
    layer, model = _joined()
    before = addresses(model)

    def fail(*_: object) -> None:
        raise PackError("no")

    with monkeypatch.context() as patch:
        patch.setattr("opgraft.ops.freezing._packed_binding", fail)
        with pytest.raises(PackError):
            opgraft.freeze(model, keep_plain=False)
    assert addresses(model) == before
    use_tables(monkeypatch, {}, {})
    opgraft.freeze(model, keep_plain=False)
    opgraft.thaw(model)
    assert addresses(model) == before
    with torch.no_grad():
        assert layer.joint_op(torch.randn(3, 16)) is not None


def test_where_packing_never_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table that decides for calls decides here too, by size and dtype."""
    rows = {torch.float32: (packed_linear.RowRange(128, 4, 256),)}
    use_tables(monkeypatch, dict.fromkeys(packed_linear.PACKED, rows), {})
    model = model_of(make(), make(16, 8), make(16, 8, dtype=torch.bfloat16))
    report = opgraft.freeze(model, keep_plain=False)
    assert [row.path for row in report.packed] == ["1"]
    assert report.kept[0].reason == "packing never pays here for 91 elements of torch.float32"
    assert "bfloat16" in report.kept[1].reason


def test_what_is_no_op_stays() -> None:
    """torch's own layers, ops that were switched off, and other people's ops are told apart from opgraft's."""

    class Narrow(Linear):
        pass

    class Theirs(Linear):
        def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward_oot(*args, **kwargs)

    with switched_off():
        off = make()
    Linear.register_oot(Theirs)
    theirs = make()
    Linear.unregister_oot(Theirs)
    report = opgraft.freeze(
        model_of(nn.Linear(13, 7), off, Narrow(13, 7), theirs, make()), keep_plain=False
    )
    assert [row.path for row in report.packed] == ["4"]
    assert [row.reason.partition(" of ")[0] for row in report.kept] == [
        "it is no op: opgraft.graft makes it one",
        "its kernel is Linear.forward_native under the settings that hold here",
        "its class is test_what_is_no_op_stays.<locals>.Narrow",
        "its class is test_what_is_no_op_stays.<locals>.Theirs",
    ]
    assert report.kept[2].reason.endswith(f"of {served_by(model_of(Narrow(13, 7))[0])}")
    assert report.kept[3].reason.endswith(
        "graft under OpgraftConfig(providers={'linear': 'opgraft'}) to pack it"
    )
    model = model_of(make())
    with switched_off():
        assert (
            opgraft.freeze(model, keep_plain=False)
            .kept[0]
            .reason.startswith("its kernel is Linear.forward_native under")
        )


def test_training_is_refused() -> None:
    """A layer in training mode is an error that names it and the next step, and nothing has changed."""
    model = model_of(make(), make())
    model[1].train()
    before = state_of(model)
    with pytest.raises(
        PackError,
        match=r"freeze\(keep_plain=False\): 1 of .* of Sequential are in training.*'1'.*model\.eval\(\) first",
    ):
        opgraft.freeze(model, keep_plain=False)
    assert state_of(model) == before


@pytest.mark.parametrize("function", [opgraft.freeze, opgraft.thaw, opgraft.refresh])
def test_what_is_no_module(function: Callable[..., object]) -> None:
    """Anything but a module is a TypeError."""
    with pytest.raises(
        TypeError,
        match=f"{function.__name__} was given the class .*Linear, expected a torch.nn.Module",
    ):
        function(Linear)


def test_where_nothing_can_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without oneDNN nothing changes and the report says why; what was packed elsewhere is plain once unpickled."""
    packed = make().eval()
    opgraft.freeze(packed, keep_plain=False)
    written, plain = pickle.dumps(packed), packed.weight
    monkeypatch.setattr(
        onednn, "missing", lambda dtype=torch.float32: "torch was built without oneDNN"
    )
    opgraft.reset()
    model = model_of(make())
    before = state_of(model)
    report = opgraft.freeze(model, keep_plain=False)
    assert state_of(model) == before
    assert report.packed == ()
    assert [row.reason for row in report.kept] == [
        "packed linear unavailable: torch was built without oneDNN"
    ]
    restored = pickle.loads(written)  # noqa: S301  # our own bytes
    assert restored.decision.chosen == "Linear.forward_native"
    assert torch.equal(restored._parameters["weight"], plain)
    check(restored(x := torch.randn(3, 13)), x, restored)
    opgraft.thaw(restored)
    assert restored.op_class is Linear


def test_packing_again(calls: Calls) -> None:
    """A second call changes nothing and reports the same; one after a detour packs what it left plain."""
    model = model_of(make(), make(dtype=torch.float64), make())
    report = opgraft.freeze(model, keep_plain=False)
    assert len(report.packed) == 2
    before = state_of(model)
    calls.clear()
    assert opgraft.freeze(model, keep_plain=False) == report
    assert calls == []
    assert state_of(model) == before
    opgraft.thaw(model)
    opgraft.thaw(model)
    assert not any(isinstance(module, PackedLinear) for module in model)


def test_the_report() -> None:
    """Names, bytes and reasons, as text of at most 80 columns and as data."""
    model = model_of(make(1024, 512), make(), nn.Linear(13, 7), nn.Linear(13, 7))
    report = opgraft.freeze(model, keep_plain=False)
    assert [(row.path, row.bytes) for row in report.packed] == [
        ("0", 4 * 1024 * 512),
        ("1", 4 * 13 * 7),
    ]
    assert report.total_bytes() == 4 * (1024 * 512 + 13 * 7)
    assert str(report).splitlines() == [
        "2 weights packed, whose plain ones took 2.0 MiB; 2 kept plain",
        "",
        "count  kept plain  the first  reason",
        "2      Linear      2          it is no op: opgraft.graft makes it one",
    ]
    data = json.loads(json.dumps(report.to_dict()))
    assert data["bytes"] == report.total_bytes()
    assert data["kept"][0] == {
        "path": "2",
        "source": "Linear",
        "reason": "it is no op: opgraft.graft makes it one",
    }


def test_rebind_and_refresh(calls: Calls) -> None:
    """Rebinding and refreshing leave packed weights packed; switched off, the native definition rebuilds them."""
    model, x = model_of(make()), torch.randn(3, 13)
    opgraft.freeze(model, keep_plain=False)
    before, cls = model(x), type(model[0])
    opgraft.refresh(model)
    assert opgraft.rebind(model) == []
    with switched_off():
        assert [row.after for row in opgraft.rebind(model)] == ["Linear.forward_native"]
        torch.testing.assert_close(model(x), before)
    opgraft.rebind(model)
    assert type(model[0]) is cls
    assert model[0]._packed is not None
    calls.clear()
    assert torch.equal(model(x), before)
    assert calls == ["linear"]


def test_a_plugin_that_comes_later() -> None:
    """A replacement that is declared after packing serves the layer once it is unpacked and bound anew."""

    class Theirs(Linear):
        def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward_oot(*args, **kwargs) + 1

    model = model_of(make())
    opgraft.freeze(model, keep_plain=False)
    Linear.register_oot(Theirs)
    assert opgraft.rebind(model) == []
    assert model[0].op_class is PackedLinear
    opgraft.thaw(model)
    assert model[0].op_class is Linear
    opgraft.rebind(model)
    assert model[0].op_class is Theirs


def test_an_enforced_op_stays_enforced() -> None:
    """An op that settings cannot switch off is packed and unpacked as such."""
    op = make()
    op._adopt(enforced(op.binding))
    model = model_of(op)
    with switched_off():
        assert len(opgraft.freeze(model, keep_plain=False).packed) == 1
        opgraft.rebind(model)
        assert model[0].decision.chosen == "Linear.forward_cpu"
        opgraft.thaw(model)
        assert model[0].decision.chosen == "Linear.forward_cpu"


def test_other_code_derived_a_class() -> None:
    """A packed layer of which other code has made something else is not unpacked by half."""
    model = model_of(make(), make())
    opgraft.freeze(model, keep_plain=False)
    parametrize.register_parametrization(model[1], "bias", nn.Identity())
    before = state_of(model)
    with pytest.raises(
        PackError, match="thaw: ParametrizedPackedLinear at '1' was derived from a packed layer"
    ):
        opgraft.thaw(model)
    assert state_of(model) == before
    parametrize.remove_parametrizations(model[1], "bias")
    opgraft.thaw(model)
    assert model[1].op_class is Linear


def test_keep_plain() -> None:
    """``freeze`` reports the layers that keep plain weights; without plain weights it freezes none."""
    model = model_of(make(), nn.Linear(13, 7))
    opgraft.thaw(model)
    opgraft.freeze(model[0], keep_plain=False)
    assert declaration(model[1].weight) == 0
    report = opgraft.freeze(model)
    assert [row.path for row in report.packed] == ["0"]
    assert [(row.path, row.reason) for row in report.kept] == [("1", "keep_plain is True")]
    assert declaration(model[1].weight) > 0
    opgraft.thaw(model)
    assert declaration(model[1].weight) == 0
    assert (model[0].op_class, declaration(model[0].weight)) == (Linear, 0)
    assert opgraft.freeze(model[1].weight) == opgraft.FreezeReport()
