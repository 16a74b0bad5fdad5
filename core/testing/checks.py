"""Proofs of an op: checks of a spec and an implementation. A failure is an ``AssertionError``.

An implementation is any callable with the keywords of the form: the form, the native definition,
the registered torch op, a module, a plugin's kernel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from opgraft.ops.spec import Arguments, Layout, OpSpec, in_float64, tensors
from opgraft.platform import HOST
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Implementation = Callable[..., Any]

_Reference: Any = StorageWeakRef  # which has no types


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


def small_arguments(spec: OpSpec, variant: str, dtype: torch.dtype = torch.float32) -> Arguments:
    """Draw small arguments of a form."""
    return spec.arguments(variant, dtype, spec.leads[1], max(spec.sizes[:2]))


def growing_arguments(spec: OpSpec, variant: str) -> list[Arguments]:
    """Draw arguments of three sizes, for a compiler that must not compile for each size."""
    # Sizes 0 and 1 are compiled apart by torch.
    lead = next(lead for lead in spec.leads if min(lead) > 1)
    size = max(spec.sizes[:2])
    drawn = []
    for factor in (1, 2, 3):
        scaled = tuple(n * factor for n in lead)
        drawn.append(spec.arguments(variant, torch.float32, scaled, size))
    return drawn


def smallest_arguments(spec: OpSpec, variant: str) -> Arguments:
    """Draw the smallest arguments in float64: finite differences take two calls for each number."""
    size = min((size for size in spec.sizes if size > 1), default=1)
    leads = [lead for lead in spec.leads if min(lead) > 0]
    smallest = min(leads, key=lambda lead: (len(lead), max(lead)))
    # At most 4, as some specs have no small size.
    return spec.arguments(variant, torch.float64, smallest, min(size, 4))


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
    if brief:
        # The last leading dimensions hold a zero.
        cases = [(lead, spec.sizes[-1]) for lead in (spec.leads[1], spec.leads[-1])]
    else:
        cases = [(lead, size) for lead in spec.leads for size in spec.sizes]
        cases += spec.large
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
    # Only a shape of two dimensions or more can be swapped.
    square = next(lead for lead in spec.leads if len(lead) > 1 and min(lead) > 1)
    leads = {Layout.ELEMENTS: spec.leads[1], Layout.ROWS: spec.leads[1], Layout.SWAPPED: square}
    for layout, lead in leads.items():
        views = spec.arguments(variant, torch.float32, lead, size, layout)
        packed = dict(views)
        for name in _tensors_of(views):
            packed[name] = views[name].contiguous()
        with torch.no_grad():
            expected = tensors(spec.reference(**in_float64(packed)))
            compare(spec, torch.float32, results_of(spec, call, views), expected)


def _tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors among the arguments."""
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def check_effects(spec: OpSpec, variant: str, dtype: torch.dtype, call: Implementation) -> None:
    """Only declared arguments are written to, and no result shares memory with another tensor."""
    name = spec.functional.name
    arguments = small_arguments(spec, variant, dtype)
    taken = _tensors_of(arguments)
    before = {name: value.clone() for name, value in taken.items()}
    with torch.no_grad():
        results = call(**arguments)
    # A form that writes to arguments returns nothing.
    made = [] if spec.functional.mutates else tensors(results)
    # torch compiles around an op by its declared effects, and would reuse a tensor written to.
    written = {name for name, value in taken.items() if not torch.equal(value, before[name])}
    if written != set(spec.functional.mutates):
        raise AssertionError(
            f"{name} wrote to {sorted(written)}, declared are {sorted(spec.functional.mutates)}"
        )
    held = [value for value in (*taken.values(), *made) if value.numel()]
    if len(memory_of(held)) != len(held):
        raise AssertionError(f"{name} returned memory of an argument, or the same memory twice")


def memory_of(values: Iterable[Tensor]) -> set[object]:
    """Return what the memory of tensors is known by; empty tensors have none."""
    return {_known_by(value.untyped_storage()) for value in values if value.numel()}


def _known_by(storage: torch.UntypedStorage) -> object:
    try:
        return storage.data_ptr()
    except RuntimeError:
        # XLA tells no addresses.
        return _Reference(storage)


def check_registration(spec: OpSpec, variant: str) -> None:
    """``torch.library.opcheck`` accepts the registered op, with dynamic sizes."""
    arguments = small_arguments(spec, variant)
    if spec.differentiable and not spec.functional.mutates:
        arguments = with_gradients(arguments)
    ordered = inspect.signature(spec.functional.native).bind(**arguments)
    tools = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # This one compares arguments in a way that 8-bit floating point lacks.
    if not any(_is_float8(value) for value in tensors(arguments.values())):
        tools.append("test_schema")
    torch.library.opcheck(registered(spec), ordered.args, ordered.kwargs, test_utils=tools)


def _is_float8(value: Tensor) -> bool:
    return value.is_floating_point() and value.itemsize == 1


def check_refusal(spec: OpSpec, variant: str, call: Implementation) -> None:
    """Gradients are never lost in silence, if the form has none: results require no gradient.

    An op that writes to arguments must refuse an argument with a gradient, and write nothing.
    """
    form = spec.functional.name
    drawn = small_arguments(spec, variant)
    required = with_gradients(drawn)
    if not spec.functional.mutates:
        if any(result.requires_grad for result in tensors(call(**required))):
            raise AssertionError(f"{form} has no gradient, and its results require one")
        return
    for name, value in _tensors_of(required).items():
        if not value.requires_grad:
            continue
        once = value * 1  # torch itself refuses to write to a leaf
        try:
            call(**{**drawn, name: once})
        except ValueError as error:
            is_untouched = torch.equal(once, drawn[name])
            if not is_untouched or f"{form}: {name} requires a gradient" not in str(error):
                raise AssertionError(
                    f"{form} refused {name} too late, or in other words: {error}"
                ) from error
        else:
            raise AssertionError(f"{form} takes {name}, which requires a gradient, and loses it")


def check_fake(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """The fake rule tells shape, dtype and layout of the registered op's results."""
    for lead in spec.leads:
        arguments = spec.arguments(variant, dtype, lead, spec.sizes[0])
        on_meta = dict(arguments)
        for name, value in _tensors_of(arguments).items():
            on_meta[name] = value.to("meta")
        with torch.no_grad():
            told = tensors(spec.functional.fake(**on_meta))
            made = tensors(registered(spec)(**arguments))
        for fake, real in zip(told, made, strict=True):
            if _form(fake, real.numel()) != _form(real, real.numel()):
                raise AssertionError(
                    f"{spec.functional.name}: the fake rule tells "
                    f"{tuple(fake.shape)} {fake.dtype} {fake.stride()}, "
                    f"the op made {tuple(real.shape)} {real.dtype} {real.stride()}"
                )


def _form(x: Tensor, numbers: int) -> tuple[Any, ...]:
    """Return shape, dtype and strides of a tensor; strides of an empty tensor mean nothing."""
    return x.shape, x.dtype, x.stride() if numbers else ()


def check_compilation(spec: OpSpec, variant: str, call: Implementation) -> None:
    """The call compiles without a graph break, once for all sizes, to the same results."""
    drawn = growing_arguments(spec, variant)
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
    arguments = smallest_arguments(spec, variant)
    floating = {
        name: value for name, value in _tensors_of(arguments).items() if value.is_floating_point()
    }

    def by_tensors(*values: Tensor) -> Any:
        given = dict(zip(floating, values, strict=True))
        return call(**{**arguments, **given})

    expect_gradients(spec.functional.name, by_tensors, list(floating.values()))


def expect_gradients(name: str, call: Callable[..., Any], values: Sequence[Tensor]) -> None:
    """Check the gradients of a call by finite differences.

    Args:
        name: of the callable in messages.
        call: takes the values.
        values: float64.
    """
    required = [value.requires_grad_() for value in values]
    if not torch.autograd.gradcheck(lambda *given: tuple(tensors(call(*given))), required):
        raise AssertionError(f"{name}: gradients differ from finite differences")


def check_outside(spec: OpSpec, variant: str, call: Implementation) -> list[str]:
    """In float32, results and gradients equal those of others; return the compared names."""
    compared = []
    for outside in spec.outside:
        theirs, their_gradients = _with_gradients_of(spec, variant, outside.call)
        # Another project's function may not have the variant.
        if not theirs:
            continue
        ours, our_gradients = _with_gradients_of(spec, variant, call)
        compare(spec, torch.float32, ours, theirs)
        torch.testing.assert_close(our_gradients, their_gradients, atol=1e-4, rtol=1e-4)
        compared.append(outside.name)
    return compared


def _with_gradients_of(
    spec: OpSpec, variant: str, call: Implementation
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the results of a call, and the gradients by all arguments."""
    arguments = small_arguments(spec, variant)
    if spec.differentiable:
        arguments = with_gradients(arguments)
    results = tensors(call(**arguments))
    return results, _gradients(arguments, results)


def results_of(spec: OpSpec, call: Implementation, arguments: Arguments) -> list[Tensor]:
    """Return the results of a call, or copies of the mutated arguments."""
    if not spec.functional.mutates:
        return tensors(call(**arguments))
    copies = {name: _copy(arguments[name]) for name in spec.functional.mutates}
    call(**{**arguments, **copies})
    return list(copies.values())


def _copy(x: Tensor) -> Tensor:
    """Copy a tensor with the memory between elements, unlike ``clone``."""
    count = x.untyped_storage().nbytes() // x.itemsize
    whole = x.as_strided((count,), (1,), 0)
    return whole.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def compare(spec: OpSpec, dtype: torch.dtype, got: list[Tensor], expected: list[Tensor]) -> float:
    """Compare results with expected ones; return the largest error, as a share of the tolerance."""
    name = spec.functional.name
    if len(got) != len(expected):
        raise AssertionError(f"{name} made {len(got)} tensors, expected {len(expected)}")
    shares = [0.0]
    for ours, theirs in zip(got, expected, strict=True):
        wanted = dtype if theirs.dtype == torch.float64 else theirs.dtype
        if ours.dtype != wanted:
            raise AssertionError(f"{name} returned {ours.dtype} for {dtype}, expected {wanted}")
        shares.append(_compare(spec, dtype, ours, theirs))
    return max(shares)


def _compare(spec: OpSpec, dtype: torch.dtype, ours: Tensor, theirs: Tensor) -> float:
    """Compare a result with the expected one; return the largest error, as a share."""
    atol, rtol = spec.tolerance(dtype)
    if theirs.dtype == torch.uint8 and torch.float4_e2m1fn_x2 in spec.tolerances:
        # torch has no arithmetic for 4 bits: such numbers come in pairs, as bytes.
        atol, rtol = spec.tolerance(torch.float4_e2m1fn_x2)
        ours = _numbers_of_4_bits(ours)
        theirs = _numbers_of_4_bits(theirs)
    elif not theirs.is_floating_point():
        atol = rtol = 0.0
    elif theirs.itemsize == 1:
        atol, rtol = spec.tolerance(theirs.dtype)
        theirs = theirs.double()
    ours = ours.to(theirs)
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)
    if not atol or not theirs.numel():
        return 0.0
    share = (ours - theirs).abs() / (atol + rtol * theirs.abs())
    # Infinities are equal here, and their difference is NaN.
    return share.nan_to_num(0, 0, 0).max().item()


def _numbers_of_4_bits(packed: Tensor) -> Tensor:
    """Return the two e2m1 numbers of each byte, the lower bits first."""
    magnitudes = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), dtype=torch.float64)
    codes = torch.stack((packed & 15, packed >> 4), -1).to(HOST, torch.int64)
    return torch.cat((magnitudes, -magnitudes))[codes]


def with_gradients(arguments: Arguments) -> Arguments:
    """Return the arguments, with floating-point tensors as copies that require a gradient."""
    required = dict(arguments)
    for name, value in _tensors_of(arguments).items():
        if value.is_floating_point():
            required[name] = value.clone().requires_grad_()
    return required


def _gradients(arguments: Arguments, results: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of results by the arguments, for the same random upstream gradients."""
    leaves = [value for value in _tensors_of(arguments).values() if value.requires_grad]
    made = [result for result in results if result.requires_grad]
    if not made:
        return []
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(result.shape, generator=generator) for result in made]
    return list(torch.autograd.grad(made, leaves, upstream, allow_unused=True))
