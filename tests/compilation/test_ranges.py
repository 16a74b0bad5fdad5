"""Code of their own for ranges of sizes of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import opgraft
import pytest
import torch
from opgraft import CompilationConfig
from opgraft.compilation.graph_pass import ALL_SIZES
from opgraft.errors import CompilationError, ConfigError
from torch import Tensor, fx, nn
from torch.export import Dim


@pytest.fixture
def ran() -> Iterator[list[fx.GraphModule]]:
    """The graphs that the backend of the name ``noting`` has run, which it runs as they are."""
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, example: Any) -> Any:
        def run(*tensors: Tensor) -> Any:
            graphs.append(module)
            return module.forward(*tensors)

        return run

    known = torch._dynamo.backends.registry
    known.lookup_backend("eager")  # imports all the others, which would be forgotten with this one
    with (
        patch.dict(known._BACKENDS),
        patch.dict(known._COMPILER_FNS),
    ):  # a name that is registered is so for good
        known.register_backend(backend, name="noting")
        yield graphs


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.SiLU()).eval().requires_grad_(False)


def test_a_call_runs_the_code_nearest_to_its_size(ran: list[fx.GraphModule]) -> None:
    """A size has its own code, else that of its range, ends included, else that for any; the decision lists them."""
    config = CompilationConfig(
        level=2, backend="noting", compile_sizes=[4], compile_ranges=["9-16", "2-8"]
    )
    net = model()
    found = opgraft.compile(net, config, args=(torch.randn(3, 3),))
    assert list(found.ranges) == [range(2, 9), range(9, 17)]
    runs = {}
    for size in (1, 2, 4, 5, 8, 9, 16, 17, 400):
        x = torch.randn(size, 3)
        ran.clear()
        torch.testing.assert_close(found(x), net(x))
        (runs[size],) = ran
    assert runs[1] is runs[17] is runs[400]
    assert runs[2] is runs[5] is runs[8]
    assert runs[9] is runs[16]
    assert len({*runs.values()}) == 4
    (sizes,) = (
        part for part in found.decision.parts if part.subject == "sizes with code of their own"
    )
    assert sizes.chosen == "4, 2-8, 9-16"


class Bounded(opgraft.GraphPass):
    """Notes the sizes that it is asked about, and runs for small ones."""

    name = "bounded"
    asked: list[range] = []  # noqa: RUF012

    def applies(self, sizes: range) -> bool:
        self.asked.append(sizes)
        return sizes.stop <= 9

    def run(self, module: fx.GraphModule, model: nn.Module) -> Any:
        return 0, 0


def test_passes_know_the_range() -> None:
    """A pass may be for some sizes only, and the graph of a range knows its bounds."""
    Bounded.asked.clear()
    config = CompilationConfig(level=1, compile_ranges=["1-8"], user_passes=[f"{__name__}:Bounded"])
    net = model()
    found = opgraft.compile(net, config, args=(torch.randn(3, 3),))
    assert Bounded.asked == [ALL_SIZES, range(1, 9)]
    (code,) = found.ranges.values()
    assert [report.name for report in code.passes][-1:] == ["bounded"]
    assert "bounded" not in [report.name for report in found.passes]
    (given,) = (node for node in code.graph.graph.nodes if node.op == "placeholder")
    size = given.meta["val"].shape[0]
    assert size.node.shape_env.bound_sympy(size.node.expr).upper == 8
    for each in (1, 8, 9):
        x = torch.randn(each, 3)
        torch.testing.assert_close(found(x), net(x))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (["8-2"], r"compile_ranges has '8-2': write the first and the last"),
        (["4-4"], "and a single size in compile_sizes"),
        (["0-4"], "of at least 1"),
        (["4"], "as 2-16"),
        (["2-8", "16-32", "8-12"], r"has 2-8 and 8-12, which both have the size 8"),
    ],
)
def test_ranges_that_cannot_be(ranges: list[str], message: str) -> None:
    """A range without sizes, or below the first, or that shares one with another, is an error."""
    with pytest.raises(ConfigError, match=message):
        CompilationConfig(compile_ranges=ranges)


def test_ranges_within_dynamic_shapes() -> None:
    """A size that is named keeps its bounds: a range beyond them is an error, and so is one of a size without name."""
    config = CompilationConfig(level=1, compile_ranges=["4-32"])
    net, x = model(), torch.randn(3, 3)
    for shapes, message in (
        ({"input": {0: Dim("n", max=16)}}, "leave the range within its bounds"),
        ({"input": {0: Dim.DYNAMIC}}, "name it there"),
        ({"input": None}, r"compile_ranges is set, and the graph has none for dynamic sizes"),
    ):
        with pytest.raises(ConfigError, match=message):
            opgraft.compile(net, config, args=(x,), dynamic_shapes=shapes)
    found = opgraft.compile(net, config, args=(x,), dynamic_shapes={"input": {0: Dim("n", max=64)}})
    assert list(found.ranges) == [range(4, 33)]
    for size in (1, 64):
        assert found(torch.randn(size, 3)).shape[0] == size
    with pytest.raises(
        CompilationError,
        match=r"called with the size 65 for \w+, .* for 1 to 64, as dynamic_shapes",
    ):
        found(torch.randn(65, 3))
    found = opgraft.compile(
        net, config, args=(torch.randn(5, 3),), dynamic_shapes={"input": {0: Dim("n", min=4)}}
    )
    assert found(torch.randn(4, 3)).shape[0] == 4
    with pytest.raises(CompilationError, match="called with the size 3 for "):
        found(x)
    with pytest.raises(ConfigError, match="compile_ranges is set, and is for the mode FULL"):
        opgraft.compile(net, CompilationConfig(mode="NONE", compile_ranges=["2-4"]), args=(x,))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*")
def test_ranges_are_kept(tmp_path: Path) -> None:
    """The cache has the code of each range apart from that for any size, and finds both again."""
    settings: Any = {
        "cache": True,
        "cache_folder": str(tmp_path / "cache"),
        "compile_ranges": ["2-8"],
    }
    net, x = model(), torch.randn(3, 3)
    first, second = (
        opgraft.compile(net, CompilationConfig(**settings), args=(x,)) for _ in range(2)
    )
    assert (first.graph is None, second.graph is None) == (False, True)
    assert list(second.ranges) == [range(2, 9)]
    (general, own) = (first._codes[each].packaged.key for each in (ALL_SIZES, range(2, 9)))
    assert general != own
    for size in (1, 2, 8, 9):
        x = torch.randn(size, 3)
        torch.testing.assert_close(second(x), net(x))
