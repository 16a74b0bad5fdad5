"""State spaces by the Triton kernels, by Triton's interpreter: prompts of several chunks, states in slots, and faults.

As ``test_interpreted`` these tests need a process of their own: ``make test-triton``, or
``TRITON_INTERPRET=1 pytest tests/ops/triton/test_interpreted_states.py``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from opgraft.ops.on_triton import triton_kernels
from opgraft.ops.spec import Arguments
from opgraft.testing.catalogue import SPECS
from torch import Tensor

pytest.importorskip(
    "triton", reason="Triton is not installed here; make test-triton runs these tests"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs a process with TRITON_INTERPRET=1; make test-triton runs these tests",
        allow_module_level=True,
    )

from opgraft.ops.state_space import triton_chunks, triton_conv, triton_scan

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

TRITON = triton_kernels()
OF_PROMPTS = ("causal_conv1d", "selective_scan", "mamba_chunk_scan")
STEPS = {"causal_conv1d_update": "conv_state", "selective_state_update": "state"}
"""The forms that compute one token, and the argument that has the states."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, in turn; they are launched all the same."""
    names: list[str] = []
    launch = triton_scan.launch

    def noting(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    for module in (triton_chunks, triton_conv, triton_scan):
        monkeypatch.setattr(module, "launch", noting)
    return names


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens, so that few tokens are several of them."""
    for module in (triton_chunks, triton_scan):
        monkeypatch.setattr(module, "CHUNK", 16)


def expect_right(form: str, arguments: Arguments) -> None:
    """See that a kernel computes what the definition computes in float64."""
    spec, ours, exact = SPECS[form], dict(arguments), {}
    for name, value in arguments.items():
        exact[name] = (
            value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        )
    for name in spec.functional.mutates:
        ours[name], exact[name] = arguments[name].clone(), exact[name].clone()
    got, expected = TRITON[form](**ours), spec.functional.native(**exact)
    if spec.functional.mutates:
        got, expected = (
            [given[name] for name in spec.functional.mutates] for given in (ours, exact)
        )
    for mine, theirs in zip(got, expected, strict=True):
        atol, rtol = spec.tolerance(mine.dtype)
        torch.testing.assert_close(mine.double(), theirs, atol=atol, rtol=rtol)


def with_bounds(arguments: Arguments, *bounds: int) -> Arguments:
    """Arguments of a prompt with sequences that end there, of which the first states are those of as many."""
    states = arguments["initial_states"][: len(bounds) - 1]
    return arguments | {
        "query_start_loc": torch.tensor(bounds, dtype=torch.int32),
        "initial_states": states,
    }


@pytest.mark.parametrize("form", OF_PROMPTS)
@pytest.mark.parametrize(
    "bounds", [(0, 50), (0, 16, 48, 50), (0, 0, 17, 17, 50), (0, 1, 2, 33, 50)], ids=str
)
def test_chunks(form: str, bounds: tuple[int, ...], short_chunks: None) -> None:
    """Sequences of several chunks, whole ones and parts, of one token and of none, from states of their own."""
    expect_right(form, with_bounds(SPECS[form].arguments("", torch.float32, (50,), 5), *bounds))


@pytest.mark.parametrize("form", OF_PROMPTS)
def test_parts_of_a_prompt(form: str, short_chunks: None) -> None:
    """Parts of a prompt, each from the state that the former ended in, give what the whole gives."""
    arguments = with_bounds(SPECS[form].arguments("", torch.float32, (40,), 5), 0, 40)
    whole, final = TRITON[form](**arguments)
    found, state = [], arguments["initial_states"]
    for begin, end in ((0, 2), (2, 21), (21, 40)):
        part = {
            name: v[begin:end] if isinstance(v, Tensor) and len(v) == 40 else v
            for name, v in arguments.items()
        }
        y, state = TRITON[form](**with_bounds(part, 0, end - begin) | {"initial_states": state})
        found.append(y)
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, final, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", OF_PROMPTS)
def test_sequences_without_tokens(form: str) -> None:
    """Where there is no token at all, states stay as they were."""
    arguments = SPECS[form].arguments("", torch.float32, (0,), 5)
    y, final = TRITON[form](**arguments)
    assert y.shape == arguments["x"].shape
    assert torch.equal(final, arguments["initial_states"])


@pytest.mark.parametrize("form", OF_PROMPTS)
def test_states_of_another_dtype(form: str) -> None:
    """Prompts of a half type with states in float32, as engines keep them: what is returned has the state's dtype."""
    arguments = SPECS[form].arguments("", torch.bfloat16, (9,), 5)
    arguments["initial_states"] = arguments["initial_states"].float()
    y, final = TRITON[form](**arguments)
    exact = {
        n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in arguments.items()
    }
    expected = SPECS[form].functional.native(**exact)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.double(), expected[0], atol=1e-2, rtol=1.6e-2)
    torch.testing.assert_close(final.double(), expected[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("head_size", "state"), [(70, 3), (16, 40)])
def test_sizes_of_heads(head_size: int, state: int, short_chunks: None) -> None:
    """Heads wider than a program, and states longer than what it multiplies at a time."""
    arguments = SPECS["mamba_chunk_scan"].arguments("plain", torch.float32, (20,), head_size)
    generator = torch.Generator().manual_seed(0)
    for name in ("B", "C"):
        arguments[name] = torch.randn(20, 2, state, generator=generator)
    arguments["initial_states"] = torch.randn(4, 4, head_size, state, generator=generator)
    expect_right("mamba_chunk_scan", with_bounds(arguments, 0, 3, 20))


def test_small_decays_after_large_ones(short_chunks: None) -> None:
    """What a step decays little is not lost beside a step that decays all."""
    arguments = with_bounds(
        SPECS["mamba_chunk_scan"].arguments("plain", torch.float32, (12,), 5), 0, 12
    )
    arguments |= {
        "dt_softplus": False,
        "dt": torch.full((12, 4), 1e-4),
        "A": torch.full((4,), -1.0),
    }
    arguments["dt"][3] = 1e5
    expect_right("mamba_chunk_scan", arguments)


@pytest.mark.parametrize("form", STEPS)
def test_states_in_slots(form: str, launched: list[str]) -> None:
    """States in a part of a larger buffer are written in place, in their slots and in no other."""
    arguments = SPECS[form].arguments("", torch.float32, (6,), 9)
    name = STEPS[form]
    state = arguments[name]
    buffer = torch.full((2 * len(state), *state.shape[1:]), 77.0)
    arguments[name] = buffer[::2].copy_(state)
    expected = {n: v.clone() if isinstance(v, Tensor) else v for n, v in arguments.items()}
    TRITON[form](**arguments)
    SPECS[form].functional.native(**expected)
    torch.testing.assert_close(buffer[::2], expected[name])
    torch.testing.assert_close(arguments["out"], expected["out"])
    others = torch.tensor([slot for slot in range(len(state)) if slot not in arguments["slots"]])
    assert torch.equal(buffer[::2][others], state[others])
    assert (buffer[1::2] == 77).all()
    assert len(launched) == 1


def per_head(arguments: Arguments) -> Arguments:
    """Arguments of a step whose step sizes and weights are one number per head, expanded as Mamba-2's are."""
    heads, head_size, state = arguments["A"].shape
    expanded = {
        name: arguments[name][..., :1].expand(arguments[name].shape)
        for name in ("dt", "D", "dt_bias")
    }
    return arguments | expanded | {"A": arguments["A"][:, :1, :1].expand(heads, head_size, state)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_per_head(
    dtype: torch.dtype, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are expanded over a head are read where they lie: nothing of the size of a state is copied."""
    arguments = per_head(SPECS["selective_state_update"].arguments("", dtype, (5,), 9))
    sizes: list[int] = []
    given_or = triton_scan.given_or

    def noting(x: Tensor, *others: Tensor | None) -> list[Tensor]:
        sizes.extend(other.numel() for other in others if other is not None)
        return given_or(x, *others)

    monkeypatch.setattr(triton_scan, "given_or", noting)
    expect_right("selective_state_update", arguments)
    assert set(sizes) == {4}
    assert launched == ["step_kernel"]


def test_an_output_that_is_the_input(launched: list[str]) -> None:
    """A convolution may write its result over its input."""
    arguments = SPECS["causal_conv1d_update"].arguments("", torch.float32, (5,), 9)
    expected = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    SPECS["causal_conv1d_update"].functional.native(**expected)
    TRITON["causal_conv1d_update"](**arguments | {"out": arguments["x"]})
    torch.testing.assert_close(arguments["x"], expected["out"])
    assert launched == ["causal_conv1d_update_kernel"]


@pytest.mark.parametrize("width", [1, 2, 7])
def test_widths(width: int) -> None:
    """Convolutions of any number of taps, even of one, which has no state."""
    prompt = SPECS["causal_conv1d"].arguments("", torch.float32, (7,), 5)
    prompt |= {"weight": torch.randn(5, width), "initial_states": torch.randn(4, 5, width - 1)}
    expect_right("causal_conv1d", prompt)
    step = SPECS["causal_conv1d_update"].arguments("", torch.float32, (7,), 5)
    expect_right(
        "causal_conv1d_update",
        step | {"weight": prompt["weight"], "conv_state": torch.randn(12, 5, width - 1)},
    )


@pytest.mark.parametrize("form", STEPS)
def test_what_the_definition_takes(form: str, launched: list[str]) -> None:
    """States with gaps inside, and no token, are the definition's."""
    gaps = SPECS[form].arguments("", torch.float32, (4,), 5)
    gaps[STEPS[form]] = gaps[STEPS[form]].repeat_interleave(2, -1)[..., ::2]
    for arguments in (gaps, SPECS[form].arguments("", torch.float32, (0,), 5)):
        expected = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        SPECS[form].functional.native(**expected)
        TRITON[form](**arguments)
        for name in SPECS[form].functional.mutates:
            assert torch.equal(arguments[name], expected[name])
    assert not launched


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("causal_conv1d", {"activation": lambda name: "relu"}, "activation is 'relu'"),
    "states": (
        "causal_conv1d",
        {"initial_states": lambda states: states[..., :1]},
        "initial_states has shape",
    ),
    "slots": ("causal_conv1d_update", {"slots": lambda slots: slots + 99}, "slots reach from"),
    "bounds": (
        "selective_scan",
        {"query_start_loc": lambda bounds: bounds + 1},
        "expected it to ascend from 0",
    ),
    "steps": ("selective_scan", {"dt": lambda dt: dt[:, :2]}, "dt has shape"),
    "groups": ("mamba_chunk_scan", {"B": lambda b: b[:, :1].expand(-1, 3, -1)}, "B has 3 groups"),
    "chunks": ("mamba_chunk_scan", {"chunk_size": lambda size: 0}, "chunk_size is 0"),
    "heads": ("selective_state_update", {"D": lambda d: d[:2]}, "D has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    """What the definition refuses the kernel refuses, in the same words."""
    form, changes, said = REFUSED[case]
    arguments = SPECS[form].arguments("", torch.float32, (7,), 9)
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    messages = []
    for call in (SPECS[form].functional.native, TRITON[form]):
        with pytest.raises(ValueError, match=said) as refused:
            call(**arguments)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
