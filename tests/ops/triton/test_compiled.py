"""The Triton kernels as compilers see them: for each launch that the host code asks for, machine code of two vendors.

No GPU is needed: Triton compiles for any target, and Dynamo traces launches without making them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft.ops.on_triton import triton_kernels, triton_missing
from opgraft.ops.spec import OpSpec
from opgraft.testing.catalogue import SPECS
from packaging.version import Version

triton = pytest.importorskip(
    "triton", reason="Triton is not installed here; make test-triton runs these tests"
)

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

if knobs.runtime.interpret:
    pytest.skip(
        "TRITON_INTERPRET is set, so that there is nothing to compile", allow_module_level=True
    )

TARGETS = {"cubin": GPUTarget("cuda", 90, 32)}
if Version(triton.__version__) >= Version("3.7"):  # which brings a linker for AMD
    TARGETS["hsaco"] = GPUTarget("hip", "gfx942", 64)
TRITON = triton_kernels()
CASES = [(SPECS[name], variant) for name in TRITON for variant in SPECS[name].variants]
WIDE = 20_000
"""Wider than what a program holds in registers."""

SHARED = 64 * 2**10
"""Bytes of shared memory that a program has on every GPU."""

SHARED_BY_STAGES = {"cubin": 96 * 2**10, "hsaco": SHARED}
"""Those that it has on GPUs of NVIDIA which copy in the background, so that several tiles are held at once."""

each_case = pytest.mark.parametrize(
    ("spec", "variant"),
    CASES,
    ids=[spec.functional.name + (f"~{variant}" if variant else "") for spec, variant in CASES],
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_case
def test_machine_code(spec: OpSpec, variant: str, dtype: torch.dtype, launches, on_meta) -> None:
    """Every kernel compiles to machine code for both targets, from the signatures of its real launches."""
    of_heads = any(word in spec.functional.op for word in ("rotary", "attention", "cache"))
    sizes = (spec.sizes[-1],) if of_heads else (spec.sizes[-1], WIDE)
    for size in sizes:
        arguments = on_meta(spec.arguments(variant, dtype, spec.leads[1], size))
        TRITON[spec.functional.name](**arguments)
    of_one_vendor = arguments.get("dtype") in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    for launch in launches:
        for code in TARGETS.keys() & {"hsaco"} if of_one_vendor else TARGETS:
            assert launch.compiled(TARGETS[code]).asm[code]


ALIGNED = {
    "silu": lambda x, weight: (x,),
    "silu_and_mul": lambda x, weight: (x,),
    "swigluoai_and_mul": lambda x, weight: (x,),
    "rms_norm": lambda x, weight: (x, weight),
    "fused_add_rms_norm": lambda x, weight: (x, x, weight),
    "layer_norm": lambda x, weight: (x, weight.shape, weight, weight),
    "rms_norm_gated": lambda x, weight: (x, weight, x),
    "quant_fp8_dynamic": lambda x, weight: (x, (1, 128)),
}


@pytest.mark.parametrize("form", ALIGNED)
@pytest.mark.parametrize("width", [4096, 8192])
def test_memory_accesses(form: str, width: int, launches) -> None:
    """Where rows are aligned, tensors are read 16 bytes at a time, and nothing spills from registers to memory."""
    x = torch.empty(4096, width, dtype=torch.bfloat16, device="meta")
    TRITON[form](*ALIGNED[form](x, x[0]))
    code = launches[0].compiled(TARGETS["cubin"]).asm["ptx"]
    assert "ld.global.v4.b32" in code
    assert ".local " not in code


def test_offsets_have_64_bits_where_tensors_need_them(launches) -> None:
    """A tensor of more than 2³¹ elements gets sizes of 64 bits, and rows are counted in 64 bits always."""
    x = torch.empty(2**20, 4096, dtype=torch.bfloat16, device="meta")
    TRITON["silu"](x)
    TRITON["rms_norm"](x)
    elementwise, by_rows = (launch.compiled(TARGETS["cubin"]).asm["ttir"] for launch in launches)
    assert "%width: i64" in elementwise
    assert "arith.extsi" in by_rows


def pages(
    tokens: int,
    sequences: int,
    head_size: int,
    dtype: torch.dtype,
    codes: torch.dtype | None = None,
    blocks: int = 256,
) -> Any:
    """Arguments on ``meta`` for attention over contexts of so many blocks, with eight key heads for 32 of the query."""
    with torch.device("meta"):
        row = head_size + (4 if codes else 0)
        return (
            torch.empty(tokens, 32, head_size, dtype=dtype),
            torch.empty(1000, 2, 8, 16, row, dtype=codes or dtype),
            torch.empty(sequences, blocks, dtype=torch.int32),
            torch.empty(sequences + 1, dtype=torch.int32),
            torch.empty(sequences, dtype=torch.int32),
            0.1,
        )


@pytest.mark.parametrize("codes", [None, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("head_size", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (256, torch.float32)]
)
@pytest.mark.parametrize(("tokens", "sequences", "parted"), [(4, 4, True), (3000, 2, False)])
def test_attention_fits(
    tokens: int,
    sequences: int,
    parted: bool,
    head_size: int,
    dtype: torch.dtype,
    codes: Any,
    launches,
) -> None:
    """Tiles fit into the registers and the shared memory of GPUs; elements are read by 16 bytes, codes by four."""
    TRITON["paged_attention"](*pages(tokens, sequences, head_size, dtype, codes))
    assert [launch.name for launch in launches] == [
        "paged_attention_kernel",
        *["added_parts_kernel"] * parted,
    ]
    for launch in launches:
        for code, target in TARGETS.items():
            compiled = launch.compiled(target)
            assert compiled.metadata.shared <= SHARED
            if code == "hsaco":
                assert "vgpr_spill_count: 0" in compiled.asm["amdgcn"]
            else:
                assert ".local " not in compiled.asm["ptx"]
    code = launches[0].compiled(TARGETS["cubin"]).asm["ptx"]
    size = "0x4" if codes else "0x10"
    assert re.search(rf"cp\.async\S+ \[[^]]*\], \[[^]]*\], {size}", code)
    assert ("mma" in code) == (dtype != torch.float32)


def latents(
    tokens: int, sequences: int, heads: int, rank: int, dtype: torch.dtype, blocks: int = 256
) -> Any:
    """Arguments on ``meta`` for attention over latents of contexts of so many blocks."""
    with torch.device("meta"):
        query = torch.empty(tokens, heads, rank + 64, dtype=dtype)
        cache = torch.empty(1000, 16, rank + 64, dtype=dtype)
        table, bounds, lengths = (
            torch.empty(n, dtype=torch.int32)
            for n in ((sequences, blocks), sequences + 1, sequences)
        )
        return query, cache, table, bounds, lengths, rank, 0.1


def heads_of_prompts(tokens: int, head_size: int, dtype: torch.dtype) -> Any:
    """Arguments on ``meta`` for causal attention with a result in fp8, with eight key heads for 32 of the query."""
    with torch.device("meta"):
        query = torch.empty(2, 32, tokens, head_size, dtype=dtype)
        keys = torch.empty(2, 8, tokens, head_size, dtype=dtype)
        return query, keys, keys, torch.empty(1), None, True, None, True


def experts(tokens: int, dtype: torch.dtype, activation: str) -> Any:
    """Arguments on ``meta`` for 64 experts, eight of each token."""
    with torch.device("meta"):
        x, w13, w2 = (
            torch.empty(n, dtype=dtype)
            for n in ((tokens, 2048), (64, 2048, 2048), (64, 2048, 1024))
        )
        return (
            x,
            w13,
            w2,
            torch.empty(tokens, 8),
            torch.empty(tokens, 8, dtype=torch.int64),
            activation,
        )


def scan(tokens: int, dtype: torch.dtype) -> Any:
    """Arguments on ``meta`` for the scan of Mamba over four sequences."""
    with torch.device("meta"):
        x, b, d = (torch.empty(n, dtype=dtype) for n in ((tokens, 4096), (tokens, 16), 4096))
        a, initial = torch.empty(4096, 16), torch.empty(4, 4096, 16)
        return x, x, a, b, b, torch.empty(5, dtype=torch.int32), initial, d, x, d, True


def heads_scan(tokens: int, dtype: torch.dtype) -> Any:
    """Arguments on ``meta`` for the scan of Mamba-2 over four sequences."""
    with torch.device("meta"):
        x, dt, b = (
            torch.empty(n, dtype=dtype) for n in ((tokens, 64, 64), (tokens, 64), (tokens, 8, 128))
        )
        a, initial = torch.empty(64), torch.empty(4, 64, 64, 128)
        return x, dt, a, b, b, torch.empty(5, dtype=torch.int32), initial, 256, a, x, a, True


def step(dtype: torch.dtype) -> Any:
    """Arguments on ``meta`` for a step of Mamba-2, of which one number per head is expanded."""
    with torch.device("meta"):
        x, dt, b = (torch.empty(n, dtype=dtype) for n in ((16, 64, 64), (16, 64, 1), (16, 8, 128)))
        numbers, state = torch.empty(64, 1, 1), torch.empty(20, 64, 64, 128)
        weight, slots = numbers[..., 0].expand(64, 64), torch.empty(16, dtype=torch.int64)
        given = (state, x, dt.expand(16, 64, 64), numbers.expand(64, 64, 128), b, b, slots, x)
        return *given, weight, x, weight, True


FITTING = {
    "scan": ("selective_scan", lambda: scan(3000, torch.bfloat16)),
    "scan by heads": ("mamba_chunk_scan", lambda: heads_scan(3000, torch.bfloat16)),
    "scan by heads, wide dtype": ("mamba_chunk_scan", lambda: heads_scan(3000, torch.float32)),
    "step by heads": ("selective_state_update", lambda: step(torch.bfloat16)),
    "latents, decodes": ("mla_paged_attention", lambda: latents(4, 4, 128, 512, torch.bfloat16)),
    "latents, few heads": ("mla_paged_attention", lambda: latents(3000, 2, 16, 512, torch.float16)),
    "latents, narrow": ("mla_paged_attention", lambda: latents(3000, 2, 16, 256, torch.float32)),
    "attention to fp8": (
        "scaled_dot_product_attention_quant_fp8_static",
        lambda: heads_of_prompts(3000, 128, torch.bfloat16),
    ),
    "attention to fp8, wide dtype": (
        "scaled_dot_product_attention_quant_fp8_static",
        lambda: heads_of_prompts(3000, 256, torch.float32),
    ),
    "experts, few tokens": ("fused_experts", lambda: experts(4, torch.bfloat16, "silu")),
    "experts, many tokens": ("fused_experts", lambda: experts(4096, torch.float16, "swigluoai")),
    "experts, wide dtype": ("fused_experts", lambda: experts(4096, torch.float32, "gelu")),
}


@pytest.mark.parametrize("case", FITTING)
def test_tiles_fit(case: str, launches) -> None:
    """Tiles of realistic sizes fit into the registers and the shared memory of GPUs."""
    form, arguments = FITTING[case]
    TRITON[form](*arguments())
    for launch in launches:
        for code, target in TARGETS.items():
            compiled = launch.compiled(target)
            assert compiled.metadata.shared <= SHARED_BY_STAGES[code]
            if code == "hsaco":
                assert "vgpr_spill_count: 0" in compiled.asm["amdgcn"]
            else:
                assert ".local " not in compiled.asm["ptx"]


@pytest.mark.parametrize("form", ["paged_attention", "mla_paged_attention"])
def test_steps_share_a_compilation(form: str, launches) -> None:
    """Neither the number of sequences, nor of blocks, nor of parts leads to other code."""
    for sequences, blocks in ((1, 256), (5, 256), (16, 99)):
        over_pages = pages(sequences, sequences, 128, torch.bfloat16, blocks=blocks)
        over_latents = latents(sequences, sequences, 16, 512, torch.bfloat16, blocks)
        TRITON[form](*(over_pages if form == "paged_attention" else over_latents))
    for name in (f"{form}_kernel", "added_parts_kernel"):
        same = [
            launch.compiled(TARGETS["cubin"]).asm["ttir"]
            for launch in launches
            if launch.name == name
        ]
        assert len(same) == 3
        assert len(set(same)) == 1


@pytest.fixture
def traceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo traces launches as where there is a GPU."""
    from opgraft.ops import triton_launch
    from opgraft.ops.quantization import triton as triton_quant
    from torch.utils import _triton

    assert triton_missing() is None
    monkeypatch.setattr(_triton, "has_triton", lambda **options: True)
    monkeypatch.setattr(triton_launch, "_launchable", lambda arguments: True)
    monkeypatch.setattr(triton_quant, "_supported", lambda: tuple(triton_quant.NAMES.values()))


LEADS = {
    "apply_rotary_emb": lambda rows: (1, rows),
    "paged_attention": lambda rows: (rows, 11),
    "mla_paged_attention": lambda rows: (rows, 11),
    "scaled_dot_product_attention_quant_fp8_static": lambda rows: (rows, 11),
    "fused_experts": lambda rows: (11 + rows % 9,),
}
"""The leading dimensions of inputs by their number of rows, where those are not it. No two sizes may be the same."""


@pytest.mark.parametrize("spec", [SPECS[name] for name in TRITON], ids=list(TRITON))
def test_launches_are_traced(spec: OpSpec, traceable: None) -> None:
    """Dynamo takes each launch into its graph without a break, and once for all numbers of rows."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        return lambda *inputs: tuple(torch.zeros(1) for _ in outputs)

    torch.compiler.reset()
    compiled = torch.compile(
        TRITON[spec.functional.name], backend=backend, fullgraph=True, dynamic=True
    )
    for rows in (6, 7, 40):
        lead = LEADS.get(spec.functional.name, lambda rows: (rows,))(rows)
        compiled(
            **spec.arguments(next(iter(spec.variants)), torch.float32, lead, max(spec.sizes[:2]))
        )
    assert len(graphs) == 1
    assert any("triton_kernel_wrapper" in str(node.target) for node in graphs[0].graph.nodes)
