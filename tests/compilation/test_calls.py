"""Calls of compiled models that a graph could compute otherwise than its model, unseen."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig
from opgraft.errors import CompilationError, ConfigError
from opgraft.ops import RMSNorm
from torch import Tensor, nn
from torch.export import Dim

EAGER = CompilationConfig(backend="eager")
WIDTH = 16
SCRIPT_METHOD = "ignore:.*script_method.*"  # torch's own, where inductor starts


def expect_alike(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Differing(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - 2 * b


def test_a_tensor_that_is_given_twice_is_two_inputs() -> None:
    """The example may have one tensor for two arguments, and calls another for each."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    expect_alike(opgraft.compile(Differing().eval(), EAGER, args=(x, x))(x, y), x - 2 * y)


class ApartForOneColumn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] == 1 else x


def test_every_dynamic_size_is_verified() -> None:
    """A model that computes something else where the second dynamic size is 1 is refused when it is compiled."""
    shapes = {"x": {0: Dim("rows"), 1: Dim("columns")}}
    with pytest.raises(
        CompilationError, match=r"differs from the model itself where the dynamic size is 1, "
    ):
        opgraft.compile(
            ApartForOneColumn().eval(), EAGER, args=(torch.randn(3, 4),), dynamic_shapes=shapes
        )


class Pairs(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b.reshape(a.shape[0], 2, -1).sum(1)


def test_sizes_that_depend_on_others_are_checked() -> None:
    """An input with twice as many rows as another is compared with it at a call, and for a batch of one."""
    rows = Dim("rows")
    shapes = {"a": {0: rows}, "b": {0: 2 * rows}}
    config = CompilationConfig(backend="eager", compile_sizes=[2])
    model = Pairs().eval()
    compiled = opgraft.compile(
        model, config, args=(torch.randn(3, 4), torch.randn(6, 4)), dynamic_shapes=shapes
    )
    for size in (1, 2, 5):
        args = torch.randn(size, 4), torch.randn(2 * size, 4)
        expect_alike(compiled(*args), model(*args))
    for others in (9, 8):
        with pytest.raises(
            CompilationError, match=rf"the shape \({others}, 4\) for b, and was captured for \[2\*s"
        ):
            compiled(torch.randn(5, 4), torch.randn(others, 4))


@pytest.mark.parametrize(("settings", "name"), [
    ({"compile_sizes": [64]}, "compile_sizes"), ({"graph_mode": "full"}, "capture_sizes"),
])  # fmt: skip
def test_sizes_beyond_the_bounds(settings: dict[str, Any], name: str) -> None:
    """Sizes that dynamic_shapes exclude get no code and no recording: the error names the setting."""
    config, shapes = CompilationConfig(backend="eager", **settings), ({0: Dim("rows", max=16)},)
    with pytest.raises(
        ConfigError,
        match=rf"compilation_config\.{name} has \d+, and dynamic_shapes give .* 1 to 16",
    ):
        opgraft.compile(
            nn.Linear(4, 4).eval(), config, args=(torch.randn(3, 4),), dynamic_shapes=shapes
        )


class Indexing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[1]


def test_a_model_that_fails_for_one_row_is_told() -> None:
    """What the model raises for the smallest batch is named, with the size."""
    with pytest.raises(
        CompilationError, match=r"Indexing fails where the dynamic size is 1: IndexError: .*min=3"
    ):
        opgraft.compile(Indexing().eval(), EAGER, args=(torch.randn(3, 4),))


def two_layers() -> nn.Sequential:
    return (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval().requires_grad_(False)
    )


def _assign(model: nn.Sequential) -> None:
    model.load_state_dict(
        {name: torch.ones_like(value) for name, value in model.state_dict().items()}, assign=True
    )


CHANGES: list[tuple[Callable[[nn.Sequential], object], str]] = [
    (_assign, r"0\.weight"),
    (lambda model: setattr(model[0], "bias", None), r"0\.bias"),
    (lambda model: setattr(model[1], "running_mean", torch.ones(WIDTH)), r"1\.running_mean"),
    (lambda model: model.__setitem__(0, nn.Sequential(model[0])), "0"),
]


@pytest.mark.parametrize(("change", "place"), CHANGES, ids=["assign", "gone", "buffer", "adapter"])
def test_other_weights_and_modules_are_noticed(
    change: Callable[[nn.Sequential], object], place: str
) -> None:
    """What is in the place of a parameter, buffer or module since is not what the graph computes with: an error."""
    model, x = two_layers(), torch.randn(3, WIDTH)
    compiled = opgraft.compile(model, EAGER, args=(x,))
    model.load_state_dict(
        {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    )
    expect_alike(compiled(x), model(x))
    change(model)
    with pytest.raises(
        CompilationError, match=rf"{place} of Sequential is another one than when it was compiled"
    ):
        compiled(x)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_compiled_models_are_not_copied(copied: Callable[[Any], Any]) -> None:
    """Their code is of one process and one model: the error says what to copy instead."""
    with pytest.raises(CompilationError, match="copy or pickle its model, and compile that"):
        copied(opgraft.compile(two_layers(), EAGER, args=(torch.randn(3, WIDTH),)))


class WritingThroughViews(nn.Module):
    """Writes to what a norm and two linear layers read, by a view, after one of them has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            RMSNorm(WIDTH),
            nn.Linear(WIDTH, 4),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        summed = x + y
        summed[:, 0] = 0
        first = self.first(summed)
        summed[:, 1] = 7
        return self.norm(summed), first, self.second(summed)


def test_passes_let_be_what_is_written_to() -> None:
    """Ops that read a tensor before and after a write to it are not joined, as one of them would read the other's."""
    model = WritingThroughViews().eval().requires_grad_(False)
    opgraft.graft(model)
    args = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    compiled = opgraft.compile(model, EAGER, args=args)
    expect_alike(compiled(*args), model(*args))
    assert {report.name for report in compiled.passes if report.replaced} <= {"no_ops"}


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


def test_writes_to_inputs_are_seen() -> None:
    """A model that writes to its input does so when it is compiled, whatever the strides; a recording cannot."""
    model = Writing().eval()
    compiled = opgraft.compile(model, EAGER, args=(torch.randn(3, 4),))
    for x in (torch.randn(5, 4), torch.randn(4, 5).t()):
        given = [x.clone(memory_format=torch.preserve_format) for _ in range(2)]
        expect_alike(compiled(given[0]), model(given[1]))
        expect_alike(*given)
    with pytest.raises(
        CompilationError,
        match="graph_mode is set, and the graph writes to a tensor that it is given",
    ):
        opgraft.compile(
            model, CompilationConfig(backend="eager", graph_mode="full"), args=(torch.randn(3, 4),)
        )


class Adding(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b


@pytest.mark.parametrize(
    ("pair", "shares"),
    [
        (lambda x: (x[0], x[0]), True),
        (lambda x: (x[0], x[0].view(torch.int32).view(torch.float32)), True),
        (lambda x: (x[0, :4], x[0, 2:]), True),
        (lambda x: (x[0].t(), x[0]), True),
        (lambda x: (x[:, 0], x[:, 1, :]), False),
        (lambda x: (x[0, :, :3], x[0, :, 3:]), False),
        (lambda x: (x[0, :, :4], x[0, :, 2:]), True),
        (lambda x: (x[0], x[1]), False),
    ],
)
def test_writes_to_shared_memory_are_refused(
    pair: Callable[[Tensor], tuple[Tensor, Tensor]], shares: bool
) -> None:
    """A graph does not see in one input what it writes to another: only tensors that share nothing are taken."""
    given, expected = (pair(torch.arange(216.0).view(6, 6, 6)) for _ in range(2))
    shapes = ({0: Dim("rows"), 1: Dim("columns")},) * 2
    compiled = opgraft.compile(
        Adding().eval(), EAGER, args=(torch.ones(3, 4), torch.ones(3, 4)), dynamic_shapes=shapes
    )
    if shares:
        with pytest.raises(
            CompilationError, match="share memory for a and b, of which it writes to one"
        ):
            compiled(*given)
    else:
        expect_alike(compiled(*given), Adding()(*expected))
        expect_alike(given, expected)


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_random_numbers_are_those_of_the_model() -> None:
    """A graph draws the numbers that its model would, and to compile it draws none."""
    x = torch.zeros(3, 4)
    torch.manual_seed(0)
    expected = Drawing()(x)
    torch.manual_seed(0)
    expect_alike(opgraft.compile(Drawing().eval(), EAGER, args=(x,))(x), expected)


def test_threads_take_turns_in_recordings() -> None:
    """Which have one memory for their inputs and results: each thread has the results of its own call."""
    model = two_layers()
    config = CompilationConfig(backend="eager", graph_mode="full", capture_sizes=[8])
    compiled = opgraft.compile(model, config, args=(torch.randn(3, WIDTH),))

    def call(number: int) -> None:
        for _ in range(100):
            x = torch.randn(1 + number, WIDTH)
            expect_alike(compiled(x), model(x))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(call, range(6)))


class Named(nn.Module):
    """Takes tensors and settings by any name, and returns what is no tensor beside one."""

    def forward(self, x: Tensor, *others: Tensor, **named: Any) -> dict[str, Any]:
        total = x + sum(others) + named["bias"] * named["factor"]
        return {
            "name": "total",
            "of": (torch.relu(total), None, 2.5),
            "again": [total, len(others)],
        }


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(
            "inductor", marks=[pytest.mark.slow, pytest.mark.filterwarnings(SCRIPT_METHOD)]
        ),
    ],
)
def test_arguments_of_any_name_and_results_that_are_no_tensors(backend: str, tmp_path: Any) -> None:
    """Tensors among ``*args`` and ``**kwargs`` have a batch as others have, and text and numbers come back as they
    are, also from the cache."""

    def given(rows: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        x = torch.randn(rows, 4)
        return (x, x + 1, x + 2), {"factor": 3, "bias": torch.randn(rows, 4)}

    kept = {"cache": True, "cache_folder": str(tmp_path / "cache")} if backend == "inductor" else {}
    args, kwargs = given(3)
    for turn in range(2):
        config = CompilationConfig(level=2, backend=backend, **kept)
        compiled = opgraft.compile(Named().eval(), config, args=args, kwargs=kwargs)
        assert compiled.decision.reason.startswith("taken from the cache") == (
            turn == 1 and bool(kept)
        )
        for rows in (1, 5):
            args, kwargs = given(rows)
            found, expected = (
                compiled(*args, **dict(reversed(kwargs.items()))),
                Named()(*args, **kwargs),
            )
            assert found.pop("name") == expected.pop("name")
            expect_alike(found, expected)
        args, kwargs = given(3)


class NamesRows(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x * 2, "one" if x.shape[0] == 1 else "many"


def test_a_constant_that_depends_on_a_size() -> None:
    """A text that is another one for a batch of one is noticed when the model is compiled."""
    with pytest.raises(
        CompilationError, match="differs from the model itself where the dynamic size is 1"
    ):
        opgraft.compile(NamesRows().eval(), EAGER, args=(torch.randn(3, 4),))
