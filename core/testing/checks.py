"""Proofs of an op: checks of a spec and an implementation. A failure is an ``AssertionError``.

An implementation is any callable with the keywords of the form: the form, the native definition,
the registered torch op, a module, a plugin's kernel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from opgraft.ops.spec import Arguments, Layout, OpSpec, in_float64, tensors
from opgraft.platform import HOST
from torch import Tensor

Implementation = Callable[..., Any]


def registered(spec: OpSpec) -> Any:
    """Return the form as ``torch.ops.opgraft.<name>``."""
    return getattr(torch.ops.opgraft, spec.functional.name)


def by_module(spec: OpSpec) -> Implementation:
    """Build a module for each call, bound to the kernel of the class here and now."""
    build = spec.module
    if build is None:
        raise ValueError(f"{spec.functional.name}: no module stands for this form")

    def call(**arguments: Any) -> Any:
        with torch.device(spec.device):
            op, inputs = build(**arguments)
        return op(**inputs) if isinstance(inputs, dict) else op(*inputs)

    return call


def check_values(
    spec: OpSpec, variant: str, dtype: torch.dtype, call: Implementation, *, brief: bool = False
) -> float:
    """Results equal the reference in float64, for small, empty and realistic inputs.

    Number, shape and dtype of the results count, too.

    Args:
        brief: use one small and one empty input, for an implementation that shares the arithmetic
            of a checked one.

    Returns:
        The largest error, as a share of the tolerance.
    """
    cases = [(lead, size) for lead in spec.leads for size in spec.sizes] + list(spec.large)
    if brief:
        cases = [(lead, spec.sizes[-1]) for lead in (spec.leads[1], spec.leads[-1])]
    shares = [0.0]
    for lead, size in cases:
        arguments = spec.arguments(variant, dtype, lead, size)
        with torch.no_grad():
            expected = tensors(spec.reference(**in_float64(arguments)))
            results = results_of(spec, call, arguments)
        try:
            shares.append(compare(spec, dtype, results, expected))
        except AssertionError as error:
            raise AssertionError(f"of inputs {lead} by {size} in {dtype}: {error}") from error
    return max(shares)


def check_strides(spec: OpSpec, variant: str, call: Implementation) -> None:
    """Views of every layout give the results of contiguous tensors."""
    size = max(spec.sizes[:2])
    square = next(lead for lead in spec.leads if len(lead) > 1 and min(lead) > 1)
    leads = {Layout.ELEMENTS: spec.leads[1], Layout.ROWS: spec.leads[1], Layout.SWAPPED: square}
    for layout, lead in leads.items():
        views = spec.arguments(variant, torch.float32, lead, size, layout)
        packed = {
            name: value.contiguous() if isinstance(value, Tensor) else value
            for name, value in views.items()
        }
        with torch.no_grad():
            expected = tensors(spec.reference(**in_float64(packed)))
            compare(spec, torch.float32, results_of(spec, call, views), expected)


def check_effects(spec: OpSpec, variant: str, dtype: torch.dtype, call: Implementation) -> None:
    """Only declared arguments are written to, and no result shares memory with another tensor."""
    arguments = spec.arguments(variant, dtype, spec.leads[1], max(spec.sizes[:2]))
    taken = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    before = {name: value.clone() for name, value in taken.items()}
    with torch.no_grad():
        made = (
            tensors(call(**arguments))
            if not spec.functional.mutates
            else (call(**arguments), [])[1]
        )
    written = {name for name, value in taken.items() if not torch.equal(value, before[name])}
    if written != set(spec.functional.mutates):
        raise AssertionError(
            f"{spec.functional.name} wrote to {sorted(written)}, "
            f"declared are {sorted(spec.functional.mutates)}"
        )
    memory = [
        value.untyped_storage().data_ptr() for value in (*taken.values(), *made) if value.numel()
    ]
    if len(set(memory)) != len(memory):
        raise AssertionError(
            f"{spec.functional.name} returned memory of an argument, or the same memory twice"
        )


def check_registration(spec: OpSpec, variant: str) -> None:
    """``torch.library.opcheck`` accepts the registered op, with dynamic sizes."""
    arguments = spec.arguments(variant, torch.float32, spec.leads[1], max(spec.sizes[:2]))
    if spec.differentiable and not spec.functional.mutates:
        arguments = with_gradients(arguments)
    signature = inspect.signature(spec.functional.native)
    ordered = signature.bind(**arguments)
    tools = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(
        value.is_floating_point() and value.itemsize == 1 for value in tensors(arguments.values())
    ):
        tools.append(
            "test_schema"
        )  # which compares arguments in a way that 8-bit floating point lacks
    torch.library.opcheck(registered(spec), ordered.args, ordered.kwargs, test_utils=tools)


def check_refusal(spec: OpSpec, variant: str, call: Implementation) -> None:
    """Gradients are never lost in silence, if the form has none: results require no gradient.

    An op that writes to arguments must refuse an argument with a gradient, and write nothing.
    """
    drawn = spec.arguments(variant, torch.float32, spec.leads[1], max(spec.sizes[:2]))
    required = with_gradients(drawn)
    if not spec.functional.mutates:
        if any(result.requires_grad for result in tensors(call(**required))):
            raise AssertionError(
                f"{spec.functional.name} has no gradient, and its results require one"
            )
        return
    for name in (
        name
        for name, value in required.items()
        if isinstance(value, Tensor) and value.requires_grad
    ):
        once = required[name] * 1  # torch itself refuses to write to a leaf
        try:
            call(**{**drawn, name: once})
        except ValueError as error:
            if not torch.equal(
                once, drawn[name]
            ) or f"{spec.functional.name}: {name} requires a gradient" not in str(error):
                raise AssertionError(
                    f"{spec.functional.name} refused {name} too late, or in other words: {error}"
                ) from error
        else:
            raise AssertionError(
                f"{spec.functional.name} takes {name}, which requires a gradient, and loses it"
            )


def check_fake(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """The fake rule tells shape, dtype and layout of the registered op's results."""
    for lead in spec.leads:
        arguments = spec.arguments(variant, dtype, lead, spec.sizes[0])
        on_meta = {
            name: value.to("meta") if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        with torch.no_grad():
            told, made = (
                tensors(spec.functional.fake(**on_meta)),
                tensors(registered(spec)(**arguments)),
            )
        for fake, real in zip(told, made, strict=True):
            strides = (
                (fake.stride(), real.stride()) if real.numel() else ((), ())
            )  # of empty tensors they mean nothing
            if (fake.shape, fake.dtype, strides[0]) != (real.shape, real.dtype, strides[1]):
                raise AssertionError(
                    f"{spec.functional.name}: the fake rule tells "
                    f"{tuple(fake.shape)} {fake.dtype} {fake.stride()}, "
                    f"the op made {tuple(real.shape)} {real.dtype} {real.stride()}"
                )


def check_compilation(spec: OpSpec, variant: str, call: Implementation) -> None:
    """The call compiles without a graph break, once for all sizes, to the same results."""
    lead, size = next(lead for lead in spec.leads if min(lead) > 1), max(spec.sizes[:2])
    drawn = [
        spec.arguments(variant, torch.float32, tuple(n * factor for n in lead), size)
        for factor in (1, 2, 3)
    ]
    runs = [functools.partial(results_of, spec, arguments=arguments) for arguments in drawn]
    expect_one_graph(spec.functional.name, call, runs)


def expect_one_graph(
    name: str, call: Callable[..., Any], runs: Sequence[Callable[..., list[Tensor]]]
) -> None:
    """Check that runs with inputs of different sizes share one graph, with the same results.

    Args:
        name: of the callable in messages.
        call: to compile.
        runs: each takes a callable, calls that once, and returns the results.
    """
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for run in runs:
            for ours, theirs in zip(run(call=compiled), run(call=call), strict=True):
                torch.testing.assert_close(ours, theirs, equal_nan=True)
    if len(graphs) != 1:
        raise AssertionError(f"{name} was compiled {len(graphs)} times for {len(runs)} sizes")


def check_gradients(spec: OpSpec, variant: str, call: Implementation) -> None:
    """In float64 the gradients by all tensors equal finite differences."""
    size = min((size for size in spec.sizes if size > 1), default=1)
    lead = min(
        (lead for lead in spec.leads if min(lead) > 0), key=lambda lead: (len(lead), max(lead))
    )
    arguments = spec.arguments(variant, torch.float64, lead, min(size, 4))
    names = [
        name
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]

    def by_tensors(*values: Tensor) -> Any:
        return tuple(tensors(call(**{**arguments, **dict(zip(names, values, strict=True))})))

    if not torch.autograd.gradcheck(
        by_tensors, [arguments[name].requires_grad_() for name in names]
    ):
        raise AssertionError(f"{spec.functional.name}: gradients differ from finite differences")


def check_outside(spec: OpSpec, variant: str, call: Implementation) -> list[str]:
    """In float32, results and gradients equal those of others; return the compared names."""
    compared = []
    for outside in spec.outside:
        sides = []
        for side in (call, outside.call):
            arguments = spec.arguments(variant, torch.float32, spec.leads[1], max(spec.sizes[:2]))
            arguments = with_gradients(arguments) if spec.differentiable else arguments
            results = tensors(side(**arguments))
            sides.append((results, list(_gradients(arguments, results))))
        (ours, our_gradients), (theirs, their_gradients) = sides
        if theirs:
            compare(spec, torch.float32, ours, theirs)
            torch.testing.assert_close(our_gradients, their_gradients, atol=1e-4, rtol=1e-4)
            compared.append(outside.name)
    return compared


def results_of(spec: OpSpec, call: Implementation, arguments: Arguments) -> list[Tensor]:
    """Return the results of a call, or copies of the mutated arguments."""
    if not spec.functional.mutates:
        return tensors(call(**arguments))
    own = {
        name: _copy(value) if name in spec.functional.mutates else value
        for name, value in arguments.items()
    }
    call(**own)
    return [own[name] for name in spec.functional.mutates]


def _copy(x: Tensor) -> Tensor:
    """Copy a tensor with the memory between elements, unlike ``clone``."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return whole.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def compare(spec: OpSpec, dtype: torch.dtype, got: list[Tensor], expected: list[Tensor]) -> float:
    """Compare results with expected ones; return the largest error, as a share of the tolerance."""
    shares = [0.0]
    if len(got) != len(expected):
        raise AssertionError(
            f"{spec.functional.name} made {len(got)} tensors, expected {len(expected)}"
        )
    for ours, theirs in zip(got, expected, strict=True):
        wanted = dtype if theirs.dtype == torch.float64 else theirs.dtype
        if ours.dtype != wanted:
            raise AssertionError(
                f"{spec.functional.name} returned {ours.dtype} for {dtype}, expected {wanted}"
            )
        atol, rtol = spec.tolerance(dtype)
        if theirs.dtype == torch.uint8 and torch.float4_e2m1fn_x2 in spec.tolerances:
            atol, rtol = spec.tolerance(torch.float4_e2m1fn_x2)
            ours, theirs = _numbers_of_4_bits(ours), _numbers_of_4_bits(theirs)
        elif not theirs.is_floating_point():
            atol = rtol = 0.0
        elif theirs.itemsize == 1:
            atol, rtol = spec.tolerance(theirs.dtype)
            theirs = theirs.double()
        ours = ours.to(theirs)
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)
        if atol and theirs.numel():
            share = (ours - theirs).abs() / (atol + rtol * theirs.abs())
            shares.append(share.nan_to_num(0, 0, 0).max().item())  # of infinities, which are equal
    return max(shares)


def _numbers_of_4_bits(packed: Tensor) -> Tensor:
    """Return the two e2m1 numbers of each byte, the lower bits first."""
    magnitudes = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), dtype=torch.float64)
    codes = torch.stack((packed & 15, packed >> 4), -1).to(HOST, torch.int64)
    return torch.cat((magnitudes, -magnitudes))[codes]


def with_gradients(arguments: Arguments) -> Arguments:
    """Return the arguments, with floating-point tensors as copies that require a gradient."""
    floating = {
        n: v for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point()
    }
    return {
        **arguments,
        **{name: value.clone().requires_grad_() for name, value in floating.items()},
    }


def _gradients(arguments: Arguments, results: list[Tensor]) -> Iterator[Tensor | None]:
    leaves = [
        value for value in arguments.values() if isinstance(value, Tensor) and value.requires_grad
    ]
    made = [result for result in results if result.requires_grad]
    if not made:
        return iter(())
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(result.shape, generator=generator) for result in made]
    return iter(torch.autograd.grad(made, leaves, upstream, allow_unused=True))
