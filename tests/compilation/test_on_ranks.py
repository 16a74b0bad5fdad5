"""Models whose layers ranks share, compiled: collectives are nodes, and ranks have the logits of the model itself."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, functional
from opgraft.config import ModelConfig, OpgraftConfig
from opgraft.distributed import get_tp_group, init_distributed, tensor_model_parallel_all_reduce
from opgraft.models import load_model
from opgraft.ops import GemmaRMSNorm, QuantFP8, RMSNorm
from random_decoders import DECODERS, written
from ranks import Ranks
from torch import Tensor, nn

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose biases the first rank alone adds, so that the ranks have unlike graphs."""
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    family, values = DECODERS["llama 3, with biases, tied"]
    written(family, folder, **{**values, "num_hidden_layers": 2})
    return str(folder)


class WithLogits(nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.decoder: Any = load_model(OpgraftConfig(model=ModelConfig(name=folder, dtype="float32")))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.decoder.compute_logits(self.decoder(ids, positions))
        return logits


def inputs(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(3, 99, (size,), generator=torch.Generator().manual_seed(size)), torch.arange(size)


def names(compiled: Any) -> Counter[str]:
    """The operators of opgraft in a graph."""
    targets = [str(node.target) for node in compiled.graph.graph.nodes]
    return Counter(name.split(".")[1] for name in targets if name.startswith("opgraft."))


def counts(compiled: Any, name: str) -> tuple[int, int]:
    (report,) = (report for report in compiled.passes if report.name == name)
    return report.matched, report.replaced


def communication(run: Callable[[], Any]) -> tuple[Any, Counter[str], Counter[str]]:
    """What ``run`` returns, the calls of collectives meanwhile, and the bytes that each was given and returned."""
    communicator, calls, moved = get_tp_group().communicator, Counter[str](), Counter[str]()

    def counted(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *others: Any) -> Tensor:
            result = method(x, *others)
            calls[name] += 1
            moved[name] += x.nbytes + result.nbytes
            return result

        return call

    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        vars(communicator)[name] = counted(name, getattr(communicator, name))
    try:
        return run(), calls, moved
    finally:
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            del vars(communicator)[name]


def compiled_logits(folder: str, settings: dict[str, Any], sizes: list[int]) -> tuple[list[Tensor], Counter[str]]:
    """The logits for each size, once they are those of the model itself, and the operators of the graph."""
    model = WithLogits(folder).eval()
    compiled = opgraft.compile(model, CompilationConfig(**settings), args=inputs(8))
    found = []
    with torch.no_grad():
        for size in sizes:
            found.append(compiled(*inputs(size)))
            torch.testing.assert_close(found[-1], model(*inputs(size)), rtol=1e-5, atol=1e-5)
    return found, names(compiled) if getattr(compiled, "graph", None) is not None else Counter()


def expect_equal(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"level": 0},
        {"level": 1, "pass_config": {"all_reduce_rms_norm": False}},
        {"level": 1, "splitting_ops": ["opgraft::all_reduce_rms_norm", "opgraft::all_gather"]},
        {"level": 2, "backend": "aot_eager", "pass_config": {"sequence_parallelism": True}},
    ],
    ids=str,
)
def test_at_a_level(settings: dict[str, Any], llama: str, two: Ranks) -> None:
    """One graph serves 50 sizes; the collectives of layers, embedding and logits are nodes of it, as linear maps are.
    The first are joined with the norms that follow, unless a setting says otherwise."""
    (first, graph), (second, _) = two.run(compiled_logits, llama, settings, [*range(1, 51)])
    expect_equal(first, second)
    if settings["level"]:
        switches = settings.get("pass_config", {})
        reduced = "reduce_scatter_rows" if "sequence_parallelism" in switches else "all_reduce"
        expected = {reduced if switches else "all_reduce_rms_norm": 5, "all_gather": 1, "linear": 9}
        if reduced == "reduce_scatter_rows":
            expected["all_gather_rows"] = 5
        assert {n: count for n, count in graph.items() if "all_" in n or n in ("linear", reduced)} == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, where inductor starts
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("level", "cache"), [(3, False), (2, True)])
def test_by_inductor(level: int, cache: bool, apart: bool, llama: str, two: Ranks, tmp_path: Path) -> None:
    """Generated code calls the collectives, from the cache too, of all rows and of parts."""
    settings = {"level": level, "cache": cache, "pass_config": {"sequence_parallelism": apart}}
    settings |= {"cache_folder": str(tmp_path)} if cache else {}
    for _ in range(1 + cache):
        (first, _), (second, _) = two.run(compiled_logits, llama, settings, [1, 2, 7, 50])
        expect_equal(first, second)


WIDTH = 16


class Stream(nn.Module):
    """A residual stream to which ranks add what they have, normed after each sum, and quantised where that is asked."""

    def __init__(self, norm: type[nn.Module] = RMSNorm, quantize: QuantFP8 | None = None, reads: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH, eps=eps) for eps in (1e-5, 0.1, 1e-3))
        self.quantize = quantize
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
            quantised, *scales = self.quantize(normed, self.scale) if self.quantize.static else self.quantize(normed)
            results += [quantised, *scales]
            x = quantised.to(torch.float32) * (scales[0][..., :1] if scales else self.scale)
        return [*results, *([x] if self.quantize is None else []), residual]  # x would have jumps


def expect_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        eighth = one.itemsize == 1  # of which a step is an eighth
        tolerance = {"rtol": 0.13, "atol": 2**-8} if eighth else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(one.float(), other.float(), **tolerance)


def stream(model: nn.Module, **settings: Any) -> Any:
    """The model compiled, once it has computed what the model does for many sizes."""
    compiled = opgraft.compile(
        model.eval(), CompilationConfig(**{"level": 1, **settings}), args=(torch.randn(4, WIDTH),)
    )
    for size in (1, 2, 3, 8, 9):
        x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size))
        expect_alike(compiled(x), model(x))
    return compiled


def joined(norm: str, static: bool | None, group_shape: tuple[int, int], reads: bool) -> Any:
    quantize = None if static is None else QuantFP8(static, group_shape)
    kinds = {"rms_norm": RMSNorm, "gemma_rms_norm": GemmaRMSNorm}
    compiled = stream(Stream(kinds[norm], quantize, reads))
    return counts(compiled, "all_reduce_rms_norm"), names(compiled)


@pytest.mark.parametrize(
    ("norm", "static", "group_shape"),
    [
        ("rms_norm", None, (1, -1)),
        ("gemma_rms_norm", None, (1, -1)),
        ("rms_norm", True, (-1, -1)),
        ("rms_norm", False, (1, -1)),
        ("rms_norm", False, (-1, -1)),
    ],
)
def test_sums_of_ranks_are_normed_by_one_form(
    norm: str, static: bool | None, group_shape: tuple[int, int], two: Ranks
) -> None:
    """A sum over ranks, with or without a residual, on either side of it, is joined with its norm and quantisation."""
    suffix = {None: "", True: "_quant_fp8_static", False: "_quant_fp8_dynamic"}[static]
    for report, graph in two.run(joined, norm, static, group_shape, False):
        assert report == (3, 3)
        assert graph == {f"all_reduce_{norm}{suffix}": 3}


def test_a_sum_that_is_read_besides(two: Ranks) -> None:
    """The sum over ranks alone is a result of the form where nothing is added to it, and stays apart elsewhere."""
    for report, graph in two.run(joined, "rms_norm", None, (1, -1), True):
        assert report == (3, 1)
        assert graph == {"all_reduce_rms_norm": 1, "all_reduce": 2, "fused_add_rms_norm": 2}


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


def apart(norm: str, static: bool | None, group_shape: tuple[int, int], reads: bool) -> Any:
    """The report of sequence parallelism, the graph, and calls and bytes of eight rows without and with it."""
    quantize = None if static is None else QuantFP8(static, group_shape)
    model = Stream({"rms_norm": RMSNorm, "gemma_rms_norm": GemmaRMSNorm}[norm], quantize, reads)
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
    for report, graph, before, after in two.run(apart, norm, None, (1, -1), False):
        assert report == (3, 3)
        kept = {name: graph[name] for name in graph if "rows" in name}
        assert kept == {"reduce_scatter_rows": 3, "all_gather_rows": 4}
        assert before == ({"all_reduce": 3}, 3 * 2 * whole)
        assert after == ({"reduce_scatter": 3, "all_gather": 4}, 7 * 1.5 * whole)


@pytest.mark.parametrize(("static", "group_shape"), [(True, (-1, -1)), (False, (1, -1)), (False, (1, 8))])
def test_parts_are_quantised_before_they_are_gathered(static: bool, group_shape: tuple[int, int], two: Ranks) -> None:
    """Ranks exchange results in 8 bits, with the scales of their rows, a quarter of the bytes."""
    whole, scales = 8 * WIDTH, 0 if static else 8 * 4 * (WIDTH // group_shape[1] if group_shape[1] > 0 else 1)
    for report, _, _, after in two.run(apart, "rms_norm", static, group_shape, False):
        assert report == (3, 3)
        gathered = 3 * 1.5 * (whole + scales) + 1.5 * 4 * whole
        assert after == ({"reduce_scatter": 3, "all_gather": 4 + 3 * (not static)}, 3 * 1.5 * 4 * whole + gathered)


def test_one_scale_of_all_rows(two: Ranks) -> None:
    """A scale that is computed of all rows keeps them together."""
    for report, graph, before, after in two.run(apart, "rms_norm", False, (-1, -1), False):
        assert report == (3, 0)
        assert graph == {"all_reduce_rms_norm_quant_fp8_dynamic": 3}
        assert before == after


def test_sums_that_are_read_besides(two: Ranks) -> None:
    """What reads a sum of ranks itself reads one that is gathered."""
    for report, graph, _, _ in two.run(apart, "rms_norm", None, (1, -1), True):
        assert report == (3, 3)
        assert (graph["all_reduce"], graph["reduce_scatter_rows"], graph["all_gather_rows"]) == (0, 3, 7)
