"""What is particular to state spaces: parts of a prompt, steps after it, and arguments that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional
from torch import Tensor

HEADS, SIZE, STATE, GROUPS = 4, 6, 5, 2


def drawn(*shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


def of_channels(tokens: int) -> dict[str, Tensor]:
    """Arguments of ``selective_scan``, without states."""
    names = {
        "x": (tokens, SIZE),
        "dt": (tokens, SIZE),
        "A": (SIZE, STATE),
        "B": (tokens, STATE),
        "C": (tokens, STATE),
    }
    return decaying(
        {
            name: drawn(*shape)
            for name, shape in {**names, "D": (SIZE,), "z": (tokens, SIZE)}.items()
        }
    )


def of_heads(tokens: int) -> dict[str, Tensor]:
    """Arguments of ``mamba_chunk_scan``, without states."""
    group = (tokens, GROUPS, STATE)
    names = {
        "x": (tokens, HEADS, SIZE),
        "dt": (tokens, HEADS),
        "A": (HEADS,),
        "B": group,
        "C": group,
        "D": (HEADS,),
    }
    return decaying({name: drawn(*shape) for name, shape in names.items()})


def decaying(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**given, "A": -given["A"].exp(), "dt": given["dt"].abs()}


PER_TOKEN = ("x", "dt", "B", "C", "z")


def scanned(
    given: dict[str, Tensor], start: int, end: int, states: Tensor, **others: Any
) -> tuple[Tensor, Tensor]:
    part = {name: value[start:end] if name in PER_TOKEN else value for name, value in given.items()}
    run: Any = functional.mamba_chunk_scan if "z" not in given else functional.selective_scan
    return run(
        **part, query_start_loc=torch.tensor([0, end - start]), initial_states=states, **others
    )


@pytest.mark.parametrize("tokens", [130, 257])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunks_and_parts_do_not_matter(tokens: int, chunk: int) -> None:
    """Chunks of any size, and parts that each begin with the state of the former, give the same as a step by token."""
    given, states = of_heads(tokens), torch.zeros(1, HEADS, SIZE, STATE, dtype=torch.float64)
    y, final = scanned(given, 0, tokens, states, chunk_size=chunk)
    first, between = scanned(given, 0, tokens // 3, states, chunk_size=chunk)
    second, last = scanned(given, tokens // 3, tokens, between, chunk_size=chunk)
    torch.testing.assert_close(torch.cat([first, second]), y)
    torch.testing.assert_close(last, final)
    steps = stepped(given, states)
    torch.testing.assert_close(steps, y)


def stepped(given: dict[str, Tensor], state: Tensor) -> Tensor:
    """Each token by ``selective_state_update``, whose numbers per head are expanded."""
    state, rows = state.clone(), []
    a = given["A"][:, None, None].expand(HEADS, SIZE, STATE)
    d = given["D"][:, None].expand(HEADS, SIZE)
    for x, dt, b, c in zip(given["x"], given["dt"], given["B"], given["C"], strict=True):
        out = torch.empty_like(x[None])
        step = dt[None, :, None].expand(1, HEADS, SIZE)
        functional.selective_state_update(
            state, x[None], step, a, b[None], c[None], torch.tensor([0]), out, d
        )
        rows.append(out)
    return torch.cat(rows)


@pytest.mark.parametrize("tokens", [31, 32, 33, 300, 1025])
def test_mamba_in_parts(tokens: int) -> None:
    """Mamba's scan of a prompt is that of its parts; each is summed over chunks in another way."""
    given, states = of_channels(tokens), drawn(1, SIZE, STATE)
    y, final = scanned(given, 0, tokens, states)
    first, between = scanned(given, 0, tokens // 3, states)
    second, last = scanned(given, tokens // 3, tokens, between)
    torch.testing.assert_close(torch.cat([first, second]), y)
    torch.testing.assert_close(last, final)


def test_states_that_fade_at_once() -> None:
    """Steps so large that nothing of a state is left give numbers, and the state is what the last token left."""
    given = of_heads(70)
    given["dt"] = given["dt"] * 1e4
    states = torch.ones(1, HEADS, SIZE, STATE, dtype=torch.float64)
    y, final = scanned(given, 0, 70, states, chunk_size=16)
    assert y.isfinite().all()
    last = (given["dt"][-1][:, None] * given["x"][-1])[..., None] * given["B"][
        -1
    ].repeat_interleave(2, 0)[:, None]
    torch.testing.assert_close(final[0], last)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["x", "dt", "initial_states"])
@pytest.mark.parametrize("sick", [0, 1, 2])
@pytest.mark.parametrize("draw", [of_channels, of_heads])
def test_a_sequence_that_is_not_a_number(
    draw: Callable[[int], Any], sick: int, name: str, bad: float
) -> None:
    """Those beside it are as they are without it, and it does not end in numbers itself."""
    bounds = [0, 30, 71, 100]
    of_all = HEADS if draw is of_heads else None
    states = drawn(3, *[size for size in (of_all, SIZE, STATE) if size])
    given = {**draw(100), "query_start_loc": torch.tensor(bounds), "initial_states": states}
    run: Any = functional.selective_scan
    if draw is of_heads:
        run, given["chunk_size"] = functional.mamba_chunk_scan, 8
    y, final = run(**given)
    spoilt = given[name].clone()
    spoilt[sick if name == "initial_states" else bounds[sick] + 5] = bad
    found, last = run(**{**given, name: spoilt})
    others = [number for number in range(3) if number != sick]
    rows = torch.cat([torch.arange(bounds[each], bounds[each + 1]) for each in others])
    assert torch.equal(found[rows], y[rows])
    assert torch.equal(last[others], final[others])
    assert not found[bounds[sick] : bounds[sick + 1]].isfinite().all()


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BOUNDS = torch.tensor([0, 3])


def conv(
    x: Tensor, weight: Tensor, bounds: Tensor = BOUNDS, states: Tensor | None = None, **others: Any
) -> Any:
    return functional.causal_conv1d(
        x, weight, bounds, t(1, 4, 2) if states is None else states, **others
    )


def update(slots: Any, **others: Any) -> Any:
    given: dict[str, Any] = {
        "state": t(3, 2, 4, 5),
        "x": t(2, 2, 4),
        "dt": t(2, 2, 4),
        "A": t(2, 4, 5),
        "B": t(2, 1, 5),
        "C": t(2, 1, 5),
        "out": t(2, 2, 4),
    }
    return functional.selective_state_update(**{**given, **others}, slots=torch.tensor(slots))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: conv(t(3, 5), t(4, 3)), r"causal_conv1d: x has shape \(3, 5\), expected \(3, 4\)"),
        (
            lambda: conv(t(3, 4), t(4)),
            r"causal_conv1d: weight has shape \(4,\), expected \[channels, width\]",
        ),
        (
            lambda: conv(t(3, 4), t(4, 3), torch.tensor([0, 2])),
            r"query_start_loc is \[0, 2\], expected it to ascend",
        ),
        (
            lambda: conv(t(3, 4), t(4, 3), torch.tensor([0, 1, 3])),
            "initial_states are of 1 sequences, expected 2",
        ),
        (
            lambda: conv(t(3, 4), t(4, 3), states=t(1, 4, 3)),
            r"initial_states has shape \(1, 4, 3\), expected \(1, 4, 2\)",
        ),
        (
            lambda: conv(t(3, 4), t(4, 3), activation="gelu"),
            "causal_conv1d: activation is 'gelu', expected one of",
        ),
        (
            lambda: conv(t(3, 4, dtype=torch.int64), t(4, 3)),
            "causal_conv1d: x is torch.int64, expected one of",
        ),
        (
            lambda: update([0, 3]),
            "selective_state_update: slots reach from 0 to 3, expected 0 to 2",
        ),
        (
            lambda: update([-1, 1]),
            "selective_state_update: slots reach from -1 to 1, expected 0 to 2",
        ),
        (lambda: update([1]), r"selective_state_update: slots has shape \(1,\), expected \(2,\)"),
        (lambda: update([0, 1], B=t(2, 3, 5)), "B has 3 groups, expected a divisor of 2 heads"),
        (
            lambda: update([0, 1], out=t(2, 2, 5)),
            r"out has shape \(2, 2, 5\), expected \(2, 2, 4\)",
        ),
    ],
)
def test_arguments_that_do_not_fit(call: Callable[[], Any], words: str) -> None:
    """Shapes, dtypes, bounds and slots that do not fit are refused in words that name them."""
    with pytest.raises(ValueError, match=words):
        call()
