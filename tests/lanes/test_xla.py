"""The TPU platform on torch_xla, whose CPU client runs what a TPU would be given. Run by ``make test-xla``."""

from __future__ import annotations

import copy
import json
import os
import re
import zlib
from collections.abc import Callable
from unittest.mock import Mock

import opgraft
import pytest
import torch
from opgraft import current_platform, graft, ops
from opgraft.models import bucketing
from opgraft.plugins.selection import selected_platform
from torch import Tensor, nn

if os.environ.get("PJRT_DEVICE") != "CPU":
    pytest.skip(
        "runs on XLA's CPU client: set PJRT_DEVICE=CPU, as make test-xla does",
        allow_module_level=True,
    )
pytest.importorskip(
    "torch_xla", reason="torch_xla is not installed here; make test-xla runs these tests"
)

WIDTH, HEADS, HEAD_SIZE = 24, 4, 6
TOLERANCES = {
    torch.float32: (1e-5, 1.3e-6),
    torch.bfloat16: (2e-2, 1.6e-2),
    torch.float16: (2e-3, 2e-3),
}  # atol, rtol
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)

OPS: dict[
    str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]
] = {  # how to make it, shapes of its arguments
    "RMSNorm": (lambda: ops.RMSNorm(WIDTH), [(5, WIDTH)]),
    "RMSNorm with residual": (lambda: ops.RMSNorm(WIDTH), [(5, WIDTH), (5, WIDTH)]),
    "GemmaRMSNorm": (lambda: ops.GemmaRMSNorm(WIDTH), [(5, WIDTH)]),
    "LayerNorm": (lambda: ops.LayerNorm(WIDTH), [(2, 5, WIDTH)]),
    "Linear": (lambda: ops.Linear(WIDTH, 7), [(5, WIDTH)]),
    "SiLU": (ops.SiLU, [(5, WIDTH)]),
    "GELU": (ops.GELU, [(5, WIDTH)]),
    "GELU tanh": (lambda: ops.GELU("tanh"), [(5, WIDTH)]),
    "NewGELU": (ops.NewGELU, [(5, WIDTH)]),
    "QuickGELU": (ops.QuickGELU, [(5, WIDTH)]),
    "SiluAndMul": (ops.SiluAndMul, [(5, 2 * WIDTH)]),
    "GeluAndMul": (ops.GeluAndMul, [(5, 2 * WIDTH)]),
    "ApplyRotaryEmb": (
        ops.ApplyRotaryEmb,
        [(5, HEADS, HEAD_SIZE), (5, HEAD_SIZE // 2), (5, HEAD_SIZE // 2)],
    ),
    "ScaledDotProductAttention": (ops.ScaledDotProductAttention, [(2, HEADS, 5, HEAD_SIZE)] * 3),
    "MMEncoderAttention": (
        lambda: ops.MMEncoderAttention(HEADS, HEAD_SIZE),
        [(2, 5, HEADS * HEAD_SIZE)] * 3,
    ),
}


@pytest.fixture(autouse=True)
def tpu(fresh_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TPU platform, asked for by name."""
    monkeypatch.setenv("OPGRAFT_PLATFORM", "tpu")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A reproducible random tensor on the CPU."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(shape).encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def outputs(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return (
        [result]
        if isinstance(result, Tensor)
        else [tensor for tensor in result if tensor is not None]
    )


def assert_agrees(
    result: Tensor | tuple[Tensor, ...], exact: Tensor | tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    """Compare what XLA computed in ``dtype`` with a result in float64."""
    atol, rtol = TOLERANCES[dtype]
    for ours, reference in zip(outputs(result), outputs(exact), strict=True):
        assert ours.device.type == "xla"
        torch.testing.assert_close(ours.cpu().double(), reference, atol=atol, rtol=rtol)


class Block(nn.Module):
    """A gated feed-forward block made of ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = ops.RMSNorm(width)
        self.up = ops.Linear(width, 4 * width)
        self.gate = ops.SiluAndMul()
        self.down = ops.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gate(self.up(self.norm(x))))


def test_the_platform_is_selected_by_its_setting() -> None:
    """OPGRAFT_PLATFORM=tpu selects the platform on torch_xla, whose device, memory and generators then work."""
    platform = current_platform()
    assert (platform.name, platform.device_type, platform.compile_backend) == (
        "tpu",
        "xla",
        "openxla",
    )
    assert "PJRT_DEVICE=CPU" in selected_platform().decision.reason
    assert platform.device_count() == 1
    assert torch.float32 in platform.capability().dtypes
    assert 0 < platform.memory().free <= platform.memory().total
    drawn = []
    for _ in range(2):
        platform.manual_seed(3)
        drawn.append(torch.randn(4, device="xla").cpu())
    platform.synchronize()
    assert torch.equal(*drawn)


def test_detect_tells_what_it_runs_on(cli) -> None:
    """The command line decides as the process does, and names the package that provides the device."""
    report = cli("detect", "--json")
    assert json.loads(report.stdout)["decision"]["chosen"] == "tpu"
    assert "torch_xla" in report.stdout


@DTYPES
@pytest.mark.parametrize("kind", OPS)
def test_ops_on_the_device_agree_with_float64(kind: str, dtype: torch.dtype) -> None:
    """On an XLA device each op computes what its native definition computes in float64 on the CPU."""
    make, shapes = OPS[kind]
    op = make()
    for parameter in op.parameters():
        nn.init.normal_(parameter, std=0.5)
    arguments = [draw(*shape, dtype=dtype) for shape in shapes]
    op.to(dtype)
    exact = op.double()(*(argument.double() for argument in arguments))
    op.to(device="xla", dtype=dtype)
    assert_agrees(op(*(argument.to("xla") for argument in arguments)), exact, dtype)
    assert op.decision.chosen.endswith(("forward_native", "forward_tpu"))


@DTYPES
def test_rotary_embedding_on_the_device(dtype: torch.dtype) -> None:
    """The table moves to the device with the op, and is looked up there."""
    op = ops.RotaryEmbedding(HEAD_SIZE, HEAD_SIZE, 32, 10000.0, True, dtype)
    positions, query, key = (
        torch.tensor([3, 0, 31]),
        *(draw(3, n * HEAD_SIZE, dtype=dtype) for n in (HEADS, 2)),
    )
    exact = op.double()(positions, query.double(), key.double())
    op.to(device="xla", dtype=dtype)
    assert_agrees(op(*(x.to("xla") for x in (positions, query, key))), exact, dtype)


def test_a_kernel_for_the_device_is_bound() -> None:
    """A forward_tpu is preferred to the native definition, and is given tensors of the device."""

    @ops.CustomOp.register("xla_lane_double")
    class Double(ops.CustomOp):
        def forward_native(self, x: Tensor) -> Tensor:
            raise AssertionError("the kernel for the device was passed over")

        def forward_tpu(self, x: Tensor) -> Tensor:
            assert x.device.type == "xla"
            return x + x

    op = Double()
    assert op.decision.chosen.endswith("Double.forward_tpu")
    assert_agrees(op(draw(3).to("xla")), 2 * draw(3).double(), torch.float32)


def test_a_compiled_model_agrees_with_float64() -> None:
    """A model of ops compiles without a graph break for the backend that the platform names."""
    model = Block(WIDTH).double()
    exact = model(draw(5, WIDTH).double()).detach()
    compiled = torch.compile(
        model.float().to("xla"), backend=current_platform().compile_backend, fullgraph=True
    )
    with torch.no_grad():
        assert_agrees(compiled(draw(5, WIDTH).to("xla")), exact, torch.float32)


BUCKETS = {"decode": bucketing.decode_buckets(256), "prefill": bucketing.prefill_buckets(256)}


@pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS)
def test_batches_of_all_sizes_compile_once_per_bucket(buckets: bucketing.Buckets) -> None:
    """Batches from 1 to 256, padded to buckets, cost XLA one compilation per bucket, and each row stays right."""
    width = WIDTH + len(
        buckets.sizes
    )  # XLA remembers programs: what another test compiled would not count
    rows = draw(256, width)
    model = Block(width).double()
    exact = model(rows.double()).detach()
    compiled = torch.compile(
        model.float().to("xla"), backend="openxla", fullgraph=True, dynamic=False
    )
    compilations = current_platform().compilations

    def run(size: int) -> Tensor:
        padded = buckets.pad(
            rows[:size]
        )  # on the host: on the device each padding would be a program of its own
        return compiled(padded.to("xla")).cpu()[:size]

    before = compilations()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=len(buckets.sizes)):
        for size in range(1, 257):
            torch.testing.assert_close(run(size).double(), exact[:size], atol=1e-5, rtol=1.3e-6)
        assert compilations() - before == len(buckets.sizes)
        with bucketing.no_recompilation(compilations):
            for size in (1, 100, 256):
                run(size)


def test_without_buckets_every_size_compiles() -> None:
    """What buckets save: without them each batch size is a compilation of its own."""
    model = Block(WIDTH).to("xla")
    compilations = current_platform().compilations
    before = compilations()
    with torch.no_grad():
        for size in range(11, 19):
            model(draw(size, WIDTH).to("xla")).cpu()
    assert compilations() - before == 8


ATTENTION = {  # query, key, value, arguments
    "one token": ((1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8), {}),
    "several blocks": ((2, 3, 200, 16), (2, 3, 300, 16), (2, 3, 300, 16), {}),
    "whole blocks": ((2, 128, 8), (2, 256, 8), (2, 256, 8), {}),
    "causal": ((2, 2, 200, 16), (2, 2, 200, 16), (2, 2, 200, 16), {"is_causal": True}),
    "causal, more keys": ((1, 2, 130, 8), (1, 2, 400, 8), (1, 2, 400, 8), {"is_causal": True}),
    "causal, more queries": ((1, 2, 400, 8), (1, 2, 130, 8), (1, 2, 130, 8), {"is_causal": True}),
    "grouped heads": (
        (2, 6, 9, 8),
        (2, 2, 9, 8),
        (2, 2, 9, 8),
        {"enable_gqa": True, "is_causal": True},
    ),
    "other value size, scale": ((2, 2, 9, 8), (2, 2, 7, 8), (2, 2, 7, 5), {"scale": 0.7}),
}


def test_the_whole_kit_of_pallas(whole_kit: Callable[[str], str]) -> None:
    """The plugin's own test file passes: every check of the kit, in each dtype."""
    assert re.search(r"\d\d+ passed", whole_kit("opgraft-pallas"))


@pytest.fixture
def pallas(plugin: Callable[[str], None]) -> None:
    pytest.importorskip("jax", reason="jax is not installed here; make test-xla runs these tests")
    plugin("opgraft-pallas")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_in_pallas_agrees_with_float64(
    pallas: None, case: str, dtype: torch.dtype
) -> None:
    """The plugin's kernel takes the place of the op, and its interpreted form agrees with float64."""
    op = ops.ScaledDotProductAttention()
    assert op.decision.chosen == "PallasAttention.forward_tpu"
    *shapes, arguments = ATTENTION[case]
    query, key, value = (draw(*shape, dtype=dtype) for shape in shapes)
    exact = op.forward_native(query.double(), key.double(), value.double(), **arguments)
    assert_agrees(op(query.to("xla"), key.to("xla"), value.to("xla"), **arguments), exact, dtype)


def test_what_the_kernel_cannot_do_runs_natively(pallas: None) -> None:
    """A mask, no keys at all or a gradient: the native definition serves what the kernel does not."""
    op = ops.ScaledDotProductAttention()
    query, key, value = draw(2, 3, 8), draw(2, 5, 8), draw(2, 5, 8)
    mask = draw(3, 5) > 0
    mask[:, 0] = True
    exact = op.forward_native(query.double(), key.double(), value.double(), mask)
    assert_agrees(op(*(x.to("xla") for x in (query, key, value, mask))), exact, torch.float32)
    no_keys = op(query.to("xla"), key[:, :0].to("xla"), value[:, :0].to("xla"))
    assert no_keys.shape == (2, 3, 8)
    leaf = query.to("xla").requires_grad_()
    op(leaf, key.to("xla"), value.to("xla")).sum().backward()
    assert leaf.grad is not None


def test_attention_in_pallas_compiles(pallas: None) -> None:
    """torch.compile keeps the kernel whole, for several lengths and without a graph break."""
    op = ops.ScaledDotProductAttention()
    compiled = torch.compile(op, backend="openxla", fullgraph=True)
    for length in (3, 150, 7):
        query, key, value = (draw(2, length, 8) + shift for shift in (0, 1, 2))
        exact = op.forward_native(query.double(), key.double(), value.double(), is_causal=True)
        result = compiled(query.to("xla"), key.to("xla"), value.to("xla"), is_causal=True)
        assert_agrees(result, exact, torch.float32)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_lowers_for_a_tpu(pallas: None, is_causal: bool) -> None:
    """Without the interpreter the kernel becomes a program for a TPU, as far as that can be told without one."""
    import jax
    from jax import export
    from opgraft_pallas import kernel

    shapes = [
        jax.ShapeDtypeStruct((heads, tokens, 64), "bfloat16")
        for heads, tokens in ((6, 200), (2, 300), (2, 300))
    ]
    function = jax.jit(kernel.attention(0.125, is_causal, False))
    assert "tpu_custom_call" in export.export(function, platforms=["tpu"])(*shapes).mlir_module()


def test_a_grafted_llama_attends_in_pallas(pallas: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of transformers, grafted and on the device, agrees with itself in float64; Pallas does its attention."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    ids = torch.randint(0, 99, (2, 7))
    with torch.no_grad():
        expected = model.double()(ids, use_cache=False).logits
        served = {row.implementation: row.count for row in graft(model.float()).counts()}
        assert served["PallasAttention.forward_tpu"] == 2
        kernel = Mock(wraps=torch.ops.opgraft_pallas.attention)
        monkeypatch.setattr("opgraft_pallas.op.attention", kernel)
        logits = model.to("xla")(ids.to("xla"), use_cache=False).logits
    assert kernel.call_count == 2
    assert_agrees(logits, expected, torch.float32)


def test_compiled_by_openxla() -> None:
    """opgraft.compile takes the platform's backend where none is set; one graph serves every size of the batch, of
    each of which XLA makes a program."""
    torch.manual_seed(0)
    model = Block(WIDTH).eval().requires_grad_(False)
    expected = {size: model(draw(size, WIDTH)) for size in (4, 1, 2, 9)}
    on_device = copy.deepcopy(model).to("xla")
    compiled = opgraft.compile(on_device, args=(draw(4, WIDTH).to("xla"),))
    assert (compiled.decision.chosen, compiled.decision.parts[0].chosen) == (
        "openxla",
        "torch.export",
    )
    for size, reference in expected.items():
        assert_agrees(compiled(draw(size, WIDTH).to("xla")), reference.double(), torch.float32)
    for name in ("openxla", "eager"):
        stock = opgraft.CompilationConfig(
            mode=opgraft.CompilationMode.STOCK_TORCH_COMPILE, backend=name
        )
        by_torch = opgraft.compile(on_device, stock, args=(draw(4, WIDTH).to("xla"),))
        for size, reference in expected.items():
            with torch.no_grad():
                assert_agrees(
                    by_torch(draw(size, WIDTH).to("xla")), reference.double(), torch.float32
                )
