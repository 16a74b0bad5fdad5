"""The plugin opgraft-ipex on Intel's extension, whose CPU kernels also run elsewhere. Run by ``make test-ipex``."""

from __future__ import annotations

import copy
import importlib
import math
import re
import zlib
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from opgraft import graft, load_plugins, ops
from opgraft.registry.state import PluginStatus, host_state
from torch import Tensor, nn

pytest.importorskip(
    "intel_extension_for_pytorch",
    reason="Intel's extension is not installed here; make test-ipex runs these tests",
)

HIDDEN, HEADS, KEY_HEADS, HEAD_SIZE, POSITIONS = 40, 4, 2, 16, 64
TOLERANCES = {
    torch.float32: (1e-5, 1.3e-6),
    torch.bfloat16: (3e-2, 1.6e-2),
    torch.float16: (4e-3, 2e-3),
}  # atol, rtol
LEADING = {"tokens": (5,), "batch": (2, 3), "one token": (1,), "none": (0,)}

dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
leading = pytest.mark.parametrize("lead", LEADING.values(), ids=LEADING)


@pytest.fixture(autouse=True)
def ipex(fresh_host: None, plugin: Callable[[str], None]) -> None:
    """The plugin, installed by pip."""
    plugin("opgraft-ipex")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A reproducible random tensor."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(shape).encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def outputs(result: Tensor | tuple[Tensor | None, ...]) -> list[Tensor]:
    return (
        [result]
        if isinstance(result, Tensor)
        else [tensor for tensor in result if tensor is not None]
    )


def assert_parity(op: nn.Module, *arguments: Tensor | None) -> None:
    """Compare an op with its native definition in float64. A kernel may write to what it is given: it gets copies."""
    dtype = next(x.dtype for x in arguments if x is not None and x.is_floating_point())
    atol, rtol = TOLERANCES[dtype]
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in arguments]
    with torch.no_grad():
        ours = op(*(None if x is None else x.clone() for x in arguments))
        exact = copy.deepcopy(op).double().forward_native(*wide)
    for result, reference in zip(outputs(ours), outputs(exact), strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), reference, atol=atol, rtol=rtol)


def rms_norm(dtype: torch.dtype) -> ops.RMSNorm:
    op = ops.RMSNorm(HIDDEN, dtype=dtype)
    nn.init.normal_(op.weight)
    return op


def rotary(
    dtype: torch.dtype, *, rotary_dim: int = HEAD_SIZE, neox: bool = True
) -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(HEAD_SIZE, rotary_dim, POSITIONS, 10000.0, neox, dtype)


def test_the_plugin_is_activated_on_the_real_extension() -> None:
    """With the extension that fits this torch the plugin is active, and its CPU kernels are the ones bound."""
    load_plugins()
    assert host_state().plugins["ipex"].status is PluginStatus.ACTIVATED
    chosen = [
        op.decision.chosen
        for op in (rms_norm(torch.float32), rotary(torch.float32), ops.SiluAndMul())
    ]
    assert chosen == [
        f"Ipex{name}.forward_cpu" for name in ("RMSNorm", "RotaryEmbedding", "SiluAndMul")
    ]


def test_the_whole_kit(whole_kit: Callable[[str], str]) -> None:
    """The plugin's own test file passes: every check of the kit, in each dtype."""
    assert re.search(r"\d\d+ passed", whole_kit("opgraft-ipex"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Mock]:
    """Watch a function of the extension without taking its place."""

    def watch(name: str) -> Mock:
        functions = importlib.import_module("intel_extension_for_pytorch.llm.functional")
        mock = Mock(wraps=getattr(functions, name))
        monkeypatch.setattr(functions, name, mock)
        return mock

    return watch


@dtypes
@leading
def test_rms_norm(calls, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """The fused norm agrees with the native definition; empty input does not reach it."""
    kernel = calls("rms_norm")
    assert_parity(rms_norm(dtype), draw(*lead, HIDDEN, dtype=dtype))
    assert kernel.called == (0 not in lead)


@dtypes
@leading
def test_rms_norm_with_residual(calls, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """The fused addition and norm agree with the native definition, in both results.

    In half types, the kernel would round the sum before the norm: the definition runs.
    """
    kernel = calls("add_rms_norm")
    assert_parity(
        rms_norm(dtype), draw(*lead, HIDDEN, dtype=dtype), draw(*lead, HIDDEN, dtype=dtype) - 1
    )
    assert kernel.called == (0 not in lead and dtype is torch.float32)


@dtypes
@pytest.mark.parametrize("neox", [True, False], ids=["halves", "pairs"])
@leading
def test_rotary_embedding(calls, dtype: torch.dtype, lead: tuple[int, ...], neox: bool) -> None:
    """The fused rotation agrees with the native definition, for heads that query and key have different numbers of."""
    kernel = calls("rotary_embedding")
    positions = torch.arange(math.prod(lead)).reshape(lead) * 7 % POSITIONS
    query, key = (draw(*lead, heads * HEAD_SIZE, dtype=dtype) for heads in (HEADS, KEY_HEADS))
    assert_parity(rotary(dtype, neox=neox), positions, query, key)
    assert kernel.called == (0 not in lead)


@dtypes
@leading
def test_silu_and_mul(calls, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """The fused gate agrees with the native definition."""
    kernel = calls("silu_mul")
    assert_parity(ops.SiluAndMul(), draw(*lead, 2 * HIDDEN, dtype=dtype))
    assert kernel.called == (0 not in lead)


def test_strided_input() -> None:
    """Input that is not contiguous is served as well as any other."""
    x, residual = draw(HIDDEN, 5).T, draw(5, 2 * HIDDEN)[:, ::2]
    assert_parity(rms_norm(torch.float32), x)
    assert_parity(rms_norm(torch.float32), x, residual)
    assert_parity(ops.SiluAndMul(), x)
    heads = draw(HEADS * HEAD_SIZE, 5).T
    assert_parity(rotary(torch.float32), torch.arange(5), heads, heads)


@pytest.mark.parametrize("with_residual", [False, True])
def test_strided_weight(with_residual: bool) -> None:
    """A weight with gaps between its elements counts by its elements, not by its memory."""
    op = rms_norm(torch.float32)
    op.weight = nn.Parameter(draw(2 * HIDDEN)[::2])
    x = draw(5, HIDDEN)
    assert_parity(op, x, x.flip(0) if with_residual else None)


def test_what_the_extension_cannot_do_runs_natively() -> None:
    """Part of a head, a query alone, part of the variance: results stay those of the native definition."""
    heads = draw(5, HEADS * HEAD_SIZE)
    assert_parity(rotary(torch.float32, rotary_dim=HEAD_SIZE // 2), torch.arange(5), heads, heads)
    assert_parity(rotary(torch.float32), torch.arange(5), heads, None)
    assert_parity(ops.RMSNorm(HIDDEN, var_hidden_size=HIDDEN // 2), draw(5, HIDDEN))


def test_gradients_are_right() -> None:
    """Where a gradient is required the native definition runs, so gradients are those of the definition."""
    for op, width in ((rms_norm(torch.float64), HIDDEN), (ops.SiluAndMul(), 2 * HIDDEN)):
        x = draw(2, width, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(op, x)
        op.float()(x.float()).sum().backward()
        assert x.grad is not None


def test_a_grafted_llama_agrees(calls) -> None:
    """A model of transformers gives the logits that it gave before it was grafted; the extension's norm ran in it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4)
    ).eval()
    ids = torch.randint(0, 99, (2, 7))
    kernel = calls("rms_norm")
    with torch.no_grad():
        expected = model(ids).logits
        served = {row.implementation: row.count for row in graft(model).counts()}
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert served["IpexRMSNorm.forward_cpu"] == kernel.call_count == 5


def test_a_compiled_op_agrees() -> None:
    """torch.compile takes the kernels with what stands around them."""
    norm, x = rms_norm(torch.float32), draw(5, HIDDEN)
    compiled = torch.compile(lambda x: norm(x * 2) + 1, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), norm.forward_native(x * 2) + 1)


def test_a_compiler_sees_what_the_norm_writes(calls) -> None:
    """A compiled norm with a residual runs the kernel, and leaves the given residual as it was."""
    kernel = calls("add_rms_norm")
    op, x, residual = rms_norm(torch.float32), draw(5, HIDDEN), draw(5, HIDDEN).flip(0)
    given = residual.clone()
    compiled = torch.compile(lambda x, residual: (*op(x, residual), residual + 1), fullgraph=True)
    with torch.no_grad():
        results = compiled(x, residual)
        torch.testing.assert_close(results[:2], op.forward_native(x, given))
    assert torch.equal(results[2], given + 1)
    assert torch.equal(residual, given)
    assert kernel.call_count == 1
