"""Steps of a layer in one call of the library: when that happens, and that nobody can tell but by the time."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from opgraft import (
    CompilationConfig,
    CustomOp,
    OpgraftConfig,
    freeze,
    graft,
    ops,
    reset,
    set_config,
)
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITH_LINEAR = ("amx", "avx512_bf16", "avx512")


@pytest.fixture
def called(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that the library computes at once, as they are called; on paths that have a linear kernel."""
    import opgraft_cpu_kernels
    from opgraft_cpu_kernels import steps

    if opgraft_cpu_kernels.path() not in WITH_LINEAR:
        pytest.skip(f"the path {opgraft_cpu_kernels.path()} has no kernel for linear layers")
    names: list[str] = []
    for name in ("_gated_mlp", "_rotate_heads"):
        run = getattr(steps, name)
        monkeypatch.setattr(
            steps, name, lambda *args, name=name, run=run: names.append(name) or run(*args)
        )
    return names


def gated(
    activation: str = "silu", dtype: torch.dtype = torch.float32, bias: bool = False
) -> ops.GatedMLP:
    torch.manual_seed(0)
    return ops.GatedMLP(48, 80, activation, bias, bias).to(dtype).eval()


def one_by_one(mlp: ops.GatedMLP, x: Tensor) -> Tensor:
    """What the layers compute that the step stands for."""
    joint = mlp.joint_op(x)
    assert joint is not None
    out: Tensor = mlp.down_proj(mlp.act_and_mul(joint(x)))
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_mlp(called: list[str], activation: str, bias: bool, dtype: torch.dtype) -> None:
    """On few rows it is one call, whose result has the bits of those of its layers."""
    mlp = gated(activation, dtype, bias)
    for shape in ((48,), (1, 48), (1, 1, 48), (2, 1, 48)):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad():
            assert mlp(x).equal(one_by_one(mlp, x))
    assert called == ["_gated_mlp"] * 4


def test_many_rows_of_what_is_frozen_go_by_the_layers(called: list[str]) -> None:
    """Which have a packed weight for them."""
    mlp, x = gated(), torch.randn(128, 48)
    freeze(mlp)
    with torch.no_grad():
        assert mlp(x).equal(one_by_one(mlp, x))
    assert called == []


def test_written_weights_are_read(called: list[str]) -> None:
    """Nothing is kept of weights, frozen or not."""
    mlp, x = gated(), torch.randn(1, 48)
    freeze(mlp)
    with torch.no_grad():
        mlp(x)
        mlp.down_proj.weight.data.mul_(2)
        mlp.gate_proj.weight.data.mul_(3)
        assert mlp(x).equal(one_by_one(mlp, x))
        mlp.down_proj.weight = nn.Parameter(torch.zeros(48, 80))
        assert not mlp(x).any()
    assert called == ["_gated_mlp"] * 3


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def hooked(mlp: ops.GatedMLP) -> None:
    mlp.down_proj.register_forward_hook(lambda module, args, out: out * 2)


def hooked_before_gating(mlp: ops.GatedMLP) -> None:
    mlp.act_and_mul.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def parametrized(mlp: ops.GatedMLP) -> None:
    nn.utils.parametrize.register_parametrization(mlp.down_proj, "weight", Doubled())


def set_on_the_instance(mlp: ops.GatedMLP) -> None:
    mlp.down_proj.forward = lambda x: x.new_ones(*x.shape[:-1], 48)  # type: ignore[method-assign]


def of_another_class(mlp: ops.GatedMLP) -> None:
    mlp.down_proj = nn.Sequential(nn.Linear(80, 48), nn.ReLU()).requires_grad_(False)


def with_an_activation(mlp: ops.GatedMLP) -> None:
    mlp.down_proj = ops.Linear(80, 48, activation="relu")


CHANGES = [
    hooked,
    hooked_before_gating,
    parametrized,
    set_on_the_instance,
    of_another_class,
    with_an_activation,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_changed_is_called(called: list[str], change: Any) -> None:
    """A part that is not what it was, or for whose call somebody waits, is called."""
    mlp, x = gated(), torch.randn(1, 48)
    change(mlp)
    with torch.no_grad():
        assert mlp(x).equal(one_by_one(mlp, x))
    assert called == []


def test_a_hook_for_every_module(called: list[str]) -> None:
    mlp, seen = gated(), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module))
    )
    try:
        with torch.no_grad():
            mlp(torch.randn(1, 48))
    finally:
        handle.remove()
    assert seen.count(type(mlp.down_proj)) == 3
    assert called == []


def test_gradients_reach_every_layer(called: list[str]) -> None:
    """Also where only the last weight is trained, or only the input requires a gradient."""
    mlp = gated()
    mlp(torch.randn(1, 48)).sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())
    mlp.requires_grad_(False)
    mlp.down_proj.weight.requires_grad_(True)
    assert mlp(torch.randn(1, 48)).requires_grad
    mlp.requires_grad_(False)
    x = torch.randn(1, 48, requires_grad=True)
    (gradient,) = torch.autograd.grad(mlp(x).sum(), x)
    assert gradient.any()
    assert called == []


def test_what_follows_the_operators_sees_them(called: list[str]) -> None:
    """A FLOP counter counts the products, and ``vmap`` and autocast find operators that they know."""
    from torch.utils.flop_counter import FlopCounterMode

    mlp, x = gated(), torch.randn(1, 48)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        mlp(x)
    assert counter.get_total_flops() == 2 * 3 * 48 * 80
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert mlp(x).dtype is torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(mlp)(x[None]), mlp(x)[None])
    assert called == ["_gated_mlp"]


def test_kernels_that_are_switched_off(called: list[str]) -> None:
    """An activation, or a linear layer, that is to be native is not passed over."""
    for switch in ("-silu_and_mul", "-linear"):
        with set_config(
            OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["all", switch]))
        ):
            mlp = gated()
            with torch.no_grad():
                mlp(torch.randn(1, 48))
    assert called == []


def test_kernels_of_others_are_not_passed_over(called: list[str]) -> None:
    """A class that derives from the plugin's and computes otherwise runs."""
    import opgraft_cpu_kernels.ops as plugin

    class Halved(plugin.SiluAndMul):
        def forward_cpu(self, x: Tensor) -> Tensor:
            return super().forward_cpu(x) / 2

    mlp, x = gated(), torch.randn(1, 48)
    with torch.no_grad():
        expected = mlp(x) / 2
    del called[:]
    CustomOp.register_oot(Halved, name="SiluAndMul", priority=1)
    try:
        other = ops.GatedMLP(48, 80).eval()
        other.load_state_dict(mlp.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(other(x), expected)
    finally:
        reset()
    assert called == []


def test_compiled_code_has_none_of_it(called: list[str]) -> None:
    mlp, x = gated(), torch.randn(1, 48)
    with torch.no_grad():
        expected = mlp(x)
        del called[:]
        torch.testing.assert_close(torch.compile(mlp, backend="eager", fullgraph=True)(x), expected)
    assert called == []


def heads(
    batch: int, count: int, tokens: int, size: int, dtype: torch.dtype, adjoining: bool = True
) -> Tensor:
    """Heads as models make them of a linear layer's result; else of memory in their own order."""
    if not adjoining:
        return torch.randn(batch, count, tokens, size, dtype=dtype)
    return torch.randn(batch, tokens, count, size, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("adjoining", [True, False], ids=["by tokens", "by heads"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 5), (2, 1), (3, 4), (1, 0)])
def test_query_and_key_are_rotated_at_once(
    called: list[str], batch: int, tokens: int, neox: bool, dtype: torch.dtype, adjoining: bool
) -> None:
    """One call for both has the bits of a call for each, and the memory order of its results."""
    torch.manual_seed(0)
    op = ops.ApplyRotaryEmb(is_neox_style=neox)
    query, key = (heads(batch, count, tokens, 16, dtype, adjoining) for count in (6, 2))
    cos, sin = (torch.randn(1, tokens, 16).to(dtype) for _ in range(2))
    got = op.rotate_heads(query, key, cos, sin)
    assert called == ["_rotate_heads"]
    for x, rotated in zip((query, key), got, strict=True):
        expected = op(x.transpose(1, 2), cos[0, :, :8], sin[0, :, :8]).transpose(1, 2)
        assert rotated.equal(expected)
        assert rotated.stride() == expected.stride()


def test_a_rotation_that_somebody_waits_for(called: list[str]) -> None:
    """A hook, a gradient, and a native definition that is asked for: the op is called on each."""
    query, key = heads(1, 4, 3, 16, torch.float32), heads(1, 2, 3, 16, torch.float32)
    table, seen = torch.randn(1, 3, 16), []
    op = ops.ApplyRotaryEmb()
    handle = op.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    op.rotate_heads(query, key, table, table)
    handle.remove()
    assert seen == [(1, 3, 4, 16), (1, 3, 2, 16)]
    assert op.rotate_heads(query.requires_grad_(), key, table, table)[0].requires_grad
    with set_config(
        OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["all", "-apply_rotary_emb"]))
    ):
        ops.ApplyRotaryEmb().rotate_heads(query.detach(), key, table, table)
    assert called == []


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        (((1, 4, 3, 16), (1, 2, 3, 16), (1, 2, 16)), "fewer positions"),
        (((1, 4, 3, 16), (1, 2, 3, 8), (1, 3, 16)), "heads of another size"),
        (((1, 4, 3, 15), (1, 2, 3, 15), (1, 3, 15)), "an odd size"),
        (((4, 3, 16), (2, 3, 16), (1, 3, 16)), "no batch"),
    ],
)
def test_heads_that_do_not_fit(kernels: Any, shapes: tuple[tuple[int, ...], ...], why: str) -> None:
    """The library refuses them, so that it reads nothing that is not there."""
    query, key, table = (torch.randn(shape) for shape in shapes)
    with pytest.raises(ValueError, match="rotate_heads"):
        kernels.rotate_heads(query, key, table, table)


def test_fake_rules(kernels: Any) -> None:
    """Shapes, strides and dtypes without values are those of the results."""
    query, key, table = (
        heads(2, 6, 3, 16, torch.float32),
        heads(2, 2, 3, 16, torch.float32),
        torch.randn(1, 3, 16),
    )
    mlp = torch.randn(2, 8), torch.randn(12, 8), torch.randn(12), torch.randn(4, 6), None, "gelu"
    for op, arguments in (
        (kernels.rotate_heads, (query, key, table, table, False)),
        (kernels.gated_mlp, mlp),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_activations_are_known(kernels: Any) -> None:
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="gated_mlp: activation is 'relu', expected silu, gelu or"),
    ):
        kernels.gated_mlp(
            torch.randn(1, 8), torch.randn(8, 8), None, torch.randn(8, 4), None, "relu"
        )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_model_of_transformers_generates_the_same(called: list[str], dtype: torch.dtype) -> None:
    """Grafted, each token takes one call for each MLP and one for each rotation, and hooks go on to see theirs."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(**sizes, intermediate_size=96, vocab_size=128, pad_token_id=0)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model, prompt = copy.deepcopy(plain), torch.arange(1, 6)[None]
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    graft(model)
    expected, got = plain.generate(prompt, **options), model.generate(prompt, **options)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got.logits[0], expected.logits[0], atol=tolerance, rtol=0)
    if dtype is torch.float32:
        assert got.sequences.equal(expected.sequences)
    assert called.count("_rotate_heads") == 12
    assert called.count("_gated_mlp") >= 10
    seen: list[int] = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    assert model.generate(prompt, **options).sequences.equal(got.sequences)
    assert len(seen) == 6
