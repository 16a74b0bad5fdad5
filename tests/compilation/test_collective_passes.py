"""Passes over collectives, on two ranks: what they find, that the numbers stay, and what is exchanged."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, OpgraftConfig, functional
from opgraft.compilation.example import Example
from opgraft.compilation.key import key_of
from opgraft.compilation.sources import Sources
from opgraft.distributed import get_tp_group, init_distributed, tensor_model_parallel_all_reduce
from opgraft.errors import CompilationError
from opgraft.ops import (
    ColumnParallelLinear,
    GemmaRMSNorm,
    Linear,
    QuantFP4,
    QuantFP8,
    RMSNorm,
    RowParallelLinear,
)
from opgraft.ops.quantization.fp4 import fp4_numbers
from support.exchanges import communication, counts, names
from support.ranks import Ranks
from torch import Tensor, nn

WIDTH = 16
QUANTIZERS: dict[str, Callable[[], QuantFP8 | QuantFP4 | None]] = {
    "none": lambda: None,
    "fp8, given scale": lambda: QuantFP8(True, (-1, -1)),
    "fp8, token": lambda: QuantFP8(False, (1, -1)),
    "fp8, tensor": lambda: QuantFP8(False, (-1, -1)),
    "fp8, group": lambda: QuantFP8(False, (1, 8)),
    "fp4": QuantFP4,
}


class Stream(nn.Module):
    """A residual stream to which ranks add what they have, normed after each sum, and quantised where that is asked."""

    def __init__(
        self, norm: type[nn.Module] = RMSNorm, quantizer: str = "none", reads: bool = False
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH, eps=eps) for eps in (1e-5, 0.1, 1e-3))
        self.quantize = QUANTIZERS[quantizer]()
        self.register_buffer("scale", torch.tensor([0.02]))
        self.reads = reads
        for each in self.parameters():
            nn.init.normal_(each, generator=torch.Generator().manual_seed(1))
            each.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        results, residual = [], None
        for number, norm in enumerate(self.norms):
            part = x * (number + get_tp_group().rank_in_group)
            summed = tensor_model_parallel_all_reduce(part)
            if residual is None:
                normed, residual = norm(summed), summed
            elif number == 1:
                normed, residual = norm(summed, residual)
            else:
                residual = residual + summed
                normed = norm(residual)
            if self.reads:
                results.append(summed * 2)
            if self.quantize is None:
                x = normed
                continue
            given = isinstance(self.quantize, QuantFP4) or self.quantize.static
            quantised, scales = (
                self.quantize(normed, self.scale) if given else self.quantize(normed)
            )
            results += [quantised, scales]
            if isinstance(self.quantize, QuantFP4):
                quantised, scales = (
                    fp4_numbers(quantised, torch.float32),
                    scales.float() * self.scale,
                )
            x = quantised.to(torch.float32) * scales[..., :1]
        return [*results, *([x] if self.quantize is None else []), residual]  # x would have jumps


def expect_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-5}
        if one.dtype == torch.uint8:
            one, other = (fp4_numbers(each, torch.float32) for each in (one, other))
            tolerance = {"rtol": 0.5, "atol": 0.5}  # a step
        elif one.itemsize == 1:
            tolerance = {"rtol": 0.13, "atol": 2**-8}
        torch.testing.assert_close(one.float(), other.float(), **tolerance)


def stream(model: nn.Module, **settings: Any) -> Any:
    """The model compiled, once it has computed what the model does for many sizes."""
    # The same rows on every rank: a process that nobody has seeded draws others.
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(4))
    config = CompilationConfig(**{"level": 1, **settings})
    compiled = opgraft.compile(model.eval(), config, args=(rows,))
    for size in (1, 2, 3, 8, 9):
        x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size))
        expect_alike(compiled(x), model(x))
    return compiled


def joined(norm: str, quantizer: str, reads: bool) -> Any:
    kinds = {"rms_norm": RMSNorm, "gemma_rms_norm": GemmaRMSNorm}
    compiled = stream(Stream(kinds[norm], quantizer, reads))
    return counts(compiled, "all_reduce_rms_norm"), names(compiled)


@pytest.mark.parametrize(
    ("norm", "quantizer", "form"),
    [
        ("rms_norm", "none", "all_reduce_rms_norm"),
        ("gemma_rms_norm", "none", "all_reduce_gemma_rms_norm"),
        ("rms_norm", "fp8, given scale", "all_reduce_rms_norm_quant_fp8_static"),
        ("rms_norm", "fp8, token", "all_reduce_rms_norm_quant_fp8_dynamic"),
        ("rms_norm", "fp8, tensor", "all_reduce_rms_norm_quant_fp8_dynamic"),
        ("rms_norm", "fp4", "all_reduce_rms_norm_quant_fp4"),
    ],
)
def test_sums_of_ranks_are_normed_by_one_form(
    norm: str, quantizer: str, form: str, two: Ranks
) -> None:
    """A sum over ranks, with or without a residual, on either side of it, is joined with its norm and quantisation."""
    for report, graph in two.run(joined, norm, quantizer, False):
        assert report == (3, 3)
        assert graph == {form: 3}


def test_a_sum_that_is_read_besides(two: Ranks) -> None:
    """The sum over ranks alone is a result of the form where nothing is added to it, and stays apart elsewhere."""
    for report, graph in two.run(joined, "rms_norm", "none", True):
        assert report == (3, 1)
        assert graph == {"all_reduce_rms_norm": 1, "all_reduce": 2, "fused_add_rms_norm": 2}


class Crossed(nn.Module):
    """Two sums of ranks, of which the first is added to what the second has become."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (RMSNorm(WIDTH, eps=eps) for eps in (0.1, 1e-3))

    def forward(self, x: Tensor) -> list[Tensor]:
        early, late = (tensor_model_parallel_all_reduce(x * factor) for factor in (2, 3))
        normed, residual = self.first(late, x)
        return [normed, *self.second(early, residual)]


def crossed() -> Any:
    return counts(stream(Crossed().requires_grad_(False)), "all_reduce_rms_norm")


def test_sums_of_ranks_in_another_order(two: Ranks) -> None:
    """A sum over ranks stays apart where what is added to it is computed later: it would have to wait for that."""
    assert two.run(crossed) == [(2, 1)] * 2


def by_a_kernel() -> tuple[list[Any], ...]:
    """The collectives and the calls of a provider's kernel, with the pass off and on."""
    calls: list[Any] = []

    def all_reduce_rms_norm(
        x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: str = "tensor"
    ) -> tuple[Tensor, Tensor]:
        calls.append(x.shape)
        parts = torch.stack(get_tp_group().all_gather_object(x))  # by whatever way ranks exchange
        whole = torch.zeros_like(x) if residual is None else residual
        return functional.fused_add_rms_norm.native(parts.sum(0), whole, weight, eps)

    class Counted(RMSNorm):
        functional_oot = {"all_reduce_rms_norm": all_reduce_rms_norm}  # noqa: RUF012

    found = []
    try:
        RMSNorm.register_oot(Counted)
        for on in (False, True):
            compiled = stream(Stream(), pass_config={"all_reduce_rms_norm": on})
            calls.clear()
            _, collectives, _ = communication(functools.partial(compiled, torch.randn(2, WIDTH)))
            found.append([collectives["all_reduce"], len(calls)])
    finally:
        opgraft.reset()
        init_distributed(2)
    return tuple(found)


def test_a_kernel_for_the_form(two: Ranks) -> None:
    """A provider's kernel runs in the place of three collectives and norms."""
    assert two.run(by_a_kernel) == [([3, 0], [0, 3])] * 2


def apart(norm: str, quantizer: str, reads: bool) -> Any:
    """The report of sequence parallelism, the graph, and calls and bytes of eight rows without and with it."""
    model = Stream({"rms_norm": RMSNorm, "gemma_rms_norm": GemmaRMSNorm}[norm], quantizer, reads)
    found = []
    for on in (False, True):
        compiled = stream(model, pass_config={"sequence_parallelism": on})
        _, calls, moved = communication(functools.partial(compiled, torch.randn(8, WIDTH)))
        found.append((calls, moved.total()))
    return counts(compiled, "sequence_parallelism"), names(compiled), *found


@pytest.mark.parametrize("norm", ["rms_norm", "gemma_rms_norm"])
def test_norms_of_parts_of_the_rows(norm: str, two: Ranks) -> None:
    """Each rank norms its part of the rows, of which it keeps the residual stream, for any number of rows: three norms
    have three sums scattered and their results gathered, and the stream is gathered once, where it is returned."""
    whole = 8 * WIDTH * 4
    for report, graph, before, after in two.run(apart, norm, "none", False):
        assert report == (3, 3)
        kept = {name: graph[name] for name in graph if "rows" in name}
        assert kept == {"reduce_scatter_rows": 3, "all_gather_rows": 4}
        assert before == ({"all_reduce": 3}, 3 * whole)
        assert after == ({"reduce_scatter": 3, "all_gather": 4}, 7 * whole // 2)


@pytest.mark.parametrize(
    ("quantizer", "numbers", "scales"),
    [
        ("fp8, given scale", WIDTH, 0),
        ("fp8, token", WIDTH, 4),
        ("fp8, group", WIDTH, 2 * 4),
        ("fp4", WIDTH // 2, WIDTH // 16),
    ],
)
def test_parts_are_quantised_before_they_are_gathered(
    quantizer: str, numbers: int, scales: int, two: Ranks
) -> None:
    """Ranks exchange results in 8 or 4 bits, with the scales of their rows: a quarter or a seventh of the bytes."""
    whole = 8 * WIDTH * 4
    for report, _, _, after in two.run(apart, "rms_norm", quantizer, False):
        assert report == (3, 3)
        gathered = (3 * 8 * (numbers + scales) + whole) // 2
        assert after == (
            {"reduce_scatter": 3, "all_gather": 4 + 3 * (scales > 0)},
            3 * whole // 2 + gathered,
        )


def test_one_scale_of_all_rows(two: Ranks) -> None:
    """A scale that is computed of all rows keeps them together."""
    for report, graph, before, after in two.run(apart, "rms_norm", "fp8, tensor", False):
        assert report == (3, 0)
        assert graph == {"all_reduce_rms_norm_quant_fp8_dynamic": 3}
        assert before == after


def test_sums_that_are_read_besides(two: Ranks) -> None:
    """What reads a sum of ranks itself reads one that is gathered."""
    for report, graph, _, _ in two.run(apart, "rms_norm", "none", True):
        assert report == (3, 3)
        assert (graph["all_reduce"], graph["reduce_scatter_rows"], graph["all_gather_rows"]) == (
            0,
            3,
            7,
        )


def recorded(graph_mode: str) -> str:
    settings = {
        "graph_mode": graph_mode,
        "capture_sizes": [1, 8],
        "pass_config": {"sequence_parallelism": True},
    }
    if graph_mode == "piecewise":
        settings["splitting_ops"] = ["opgraft::all_gather_rows"]
    try:
        compiled = stream(Stream(), **settings)
    except CompilationError as error:
        return str(error)
    return str(counts(compiled, "sequence_parallelism"))


def test_parts_of_the_rows_are_not_recorded_in_pieces(two: Ranks) -> None:
    """A graph of the whole is padded before ranks take their parts; pieces would be padded after that, in each."""
    assert two.run(recorded, "full") == ["(3, 3)"] * 2
    for message in two.run(recorded, "piecewise"):
        assert "exchange a tensor of which each rank has a part of the rows" in message


class Shared(nn.Module):
    """Linear maps that ranks share, with the norm of a residual stream between them."""

    def __init__(self) -> None:
        super().__init__()
        given: dict[str, Any] = {"bias": False, "return_bias": False}
        self.up, self.last = (ColumnParallelLinear(WIDTH, 2 * WIDTH, **given) for _ in range(2))
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, **given)
        self.norm = RMSNorm(WIDTH)
        for each in self.parameters():
            nn.init.normal_(each, generator=torch.Generator().manual_seed(each.dim()))
            each.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        normed, residual = self.norm(self.down(self.up(x)), x)
        return [self.last(normed), residual]


def exchanging(provided: tuple[str, ...]) -> Any:
    """Report, graph, calls of collectives, and calls of kernels that somebody provides for forms."""
    calls = Counter[str]()

    def kernel(name: str) -> Callable[..., Tensor]:
        @functools.wraps(getattr(functional, name).native)
        def run(*args: Any) -> Tensor:
            calls[name] += 1
            found: Tensor = getattr(functional, name).native(*args)
            return found

        return run

    class Own(Linear):
        functional_oot = {name: kernel(name) for name in provided}  # noqa: RUF012

        def forward_oot(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
            return functional.linear.native(
                input, self.weight, self.bias, self.activation, residual
            )

    try:
        if provided:
            Linear.register_oot(Own)
        switches = {"sequence_parallelism": True, "async_tensor_parallelism": True}
        compiled = stream(
            Shared(), pass_config=switches, custom_ops=["all"] if provided else ["none"]
        )
        calls.clear()
        _, collectives, _ = communication(functools.partial(compiled, torch.randn(5, WIDTH)))
    finally:
        opgraft.reset()
        init_distributed(2)
    return counts(compiled, "async_tensor_parallelism"), names(compiled), collectives, calls


FUSED_MAPS = ("linear_reduce_scatter_rows", "all_gather_rows_linear")


@pytest.mark.parametrize("provided", [(), FUSED_MAPS], ids=str)
def test_linear_maps_exchange_rows(provided: tuple[str, ...], two: Ranks) -> None:
    """A map and the scattering of its rows are one form, and so are gathering rows and their map; a provider's kernel
    runs it. The residual stream, which the model returns, is gathered apart."""
    for report, graph, collectives, calls in two.run(exchanging, provided):
        assert report == (2, 2)
        assert graph == {
            **dict.fromkeys(FUSED_MAPS, 1),
            **dict.fromkeys(("linear", "rows_of_rank", "fused_add_rms_norm", "all_gather_rows"), 1),
        }
        assert collectives == {"reduce_scatter": 1, "all_gather": 2}
        assert calls == Counter(provided)


def test_a_kernel_for_a_map_is_not_passed_over(two: Ranks) -> None:
    """Where somebody provides a kernel for the linear map alone, it runs."""
    for report, graph, collectives, calls in two.run(exchanging, ("linear",)):
        assert (report, graph["linear"], calls) == ((2, 0), 3, {"linear": 3})
        assert collectives == {"reduce_scatter": 1, "all_gather": 2}


def ranks_in_key() -> Any:
    settings = OpgraftConfig().resolved().compilation_config
    return key_of(Stream(), Example((torch.randn(4, WIDTH),), {}), settings, Sources()).parts[
        "ranks"
    ]


def test_code_is_for_a_place_among_ranks(two: Ranks) -> None:
    """The key of the cache has the number of ranks, and which of them this is."""
    first, second = two.run(ranks_in_key)
    assert first[0] == second[0] != ranks_in_key()[0]
    assert first[1:] != second[1:]
