"""Finding the kernel that computes something else: what a model runs beside native definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from opgraft.binding.comparison import tensors_within
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.form_choice import choice_of
from opgraft.binding.functional import FUNCTIONALS, Functional
from opgraft.binding.names import op_name_of
from opgraft.binding.shadow import Shadow
from opgraft.binding.specialisation import Binding, native_of, watched, without_compiler
from opgraft.config import NATIVE_CHOICE, OpgraftConfig, ShadowConfig, set_config
from opgraft.errors import OpgraftError
from opgraft.registry.choice import choosing
from opgraft.registry.declarations import Replacement
from opgraft.registry.op_classes import location_of
from opgraft.state import host_state
from opgraft.text import printable
from torch import Tensor, nn

_ALWAYS = ShadowConfig(share=1.0, first_call=True)
_FORWARD = "forward"
_OF_WEIGHTS = "quant_method"
"""The attribute of a layer that holds its weight method."""
_APPLIED = ("apply", "embedding")
"""The methods by which a weight method computes."""


class _Told(Shadow):
    """A shadow that writes its first difference into a list, and logs nothing."""

    def __init__(
        self, binding: Binding, op: str, native: Any, location: str, found: list[str]
    ) -> None:
        target = binding.replacement.target
        kernel = binding.kernel_name
        provider = binding.provider
        super().__init__(target, op, kernel, provider, native, _ALWAYS)
        self._found = found
        self._place = f"{kernel} of {provider} at {location}"
        self._advice = _advice(binding)

    def _report(self) -> None:
        differs = f"differs from the native definition of op {self.op}: {self.first_drift}"
        sentence = f"{self._place} {differs}; {self._advice}"
        self._found.append(printable(sentence))


@contextmanager
def beside_native_definitions(model: nn.Module) -> Iterator[list[str]]:
    """Compare what a model runs within the block with native definitions, on the same inputs.

    Ops and functional forms are compared. A layer made of other ops keeps state, and a weight
    method has no native definition: a replacement of one is told if it makes NaN or infinity of
    finite numbers.

    Yields:
        A list that fills with a sentence for each kernel that is wrong, in the order of the calls.
    """
    found: list[str] = []
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, CustomOp):
                _watch_op(module, found, undo)
            _watch_weight_method(module, found, undo)
        # The forms of other threads stay as they are: a scope belongs to this thread.
        scope = set_config(OpgraftConfig(), origin="a comparison")
        undo.enter_context(scope)
        _watch_forms(found)
        yield found


def _watch_op(op: CustomOp, found: list[str], undo: ExitStack) -> None:
    """Compare the calls of an op whose kernel is not native, or look at the numbers that it makes."""
    bound = op.binding
    if _FORWARD in vars(op) or type(op) is not bound.specialisation:
        return
    binding = without_compiler(bound)
    native = native_of(binding)
    target: Any = binding.replacement.target
    if native is None or not target.repeatable:
        _watch_replacement(op, found, undo)
        return
    state = host_state()
    name = op_name_of(target, state) or target.__qualname__
    location = binding.kernel.winner.location
    shadow = _Told(binding, name, native.definition, location, found)
    op._adopt(watched(binding, shadow))
    undo.callback(op._adopt, bound)


def _watch_forms(found: list[str]) -> None:
    """Compare the calls of forms whose kernel is not native, within the current scope."""
    caches = host_state().current_caches()
    for form in FUNCTIONALS.values():
        call = _compared_form(form, found)
        if call is not None:
            caches.functions[form] = call, None


def _compared_form(form: Functional[..., Any], found: list[str]) -> Callable[..., Any] | None:
    """Return the kernel of a form with a comparison around it; ``None`` if the kernel is native."""
    try:
        choice = choice_of(form)
    except OpgraftError:  # no model can call the form either
        return None
    if choice.is_native:
        return None
    binding = choice.binding
    functions = binding.kernel.winner.functions or {}
    function = functions[form.name]
    location = location_of(function)
    shadow = _Told(binding, form.op, form.native, location, found)
    return shadow.around(function, form.native)


def _watch_replacement(layer: CustomOp, found: list[str], undo: ExitStack) -> None:
    """Look at the numbers that the replacement of a layer makes."""
    binding = layer.binding
    replacement = binding.replacement.winner
    if replacement is None:
        return
    sentence = _sentence(replacement, binding.kernel_name)
    call = _numbers_expected(layer.forward, layer, sentence, found)
    _hide(layer, _FORWARD, call, undo)


def _watch_weight_method(layer: nn.Module, found: list[str], undo: ExitStack) -> None:
    """Look at the numbers that the replacement of a weight method makes for a layer."""
    method = getattr(layer, _OF_WEIGHTS, None)
    replacement = _replacement_of(type(method))
    if replacement is None:
        return
    for name in _APPLIED:
        run = getattr(method, name, None)
        if run is not None and name not in vars(method):
            shown = f"{replacement.cls.__qualname__}.{name}"
            sentence = _sentence(replacement, shown)
            call = _numbers_expected(run, layer, sentence, found)
            _hide(method, name, call, undo)


def _replacement_of(cls: type) -> Replacement | None:
    for replacement in host_state().active:
        if replacement.cls is cls:
            return replacement
    return None


def _hide(owner: Any, name: str, call: Callable[..., Any], undo: ExitStack) -> None:
    """Put a function before a method of one object, until the end."""
    vars(owner)[name] = call
    undo.callback(vars(owner).pop, name)


def _numbers_expected(
    run: Callable[..., Any], layer: nn.Module, sentence: str, found: list[str]
) -> Callable[..., Any]:
    """Return a function that tells if ``run`` makes NaN or infinity of a layer's finite numbers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # A layer may be handed another one for its weights, as the head of a decoder is.
        modules = [layer]
        for each in args:
            if isinstance(each, nn.Module):
                modules.append(each)
        given = tensors_within((args, kwargs))
        sound = all(map(_is_finite, given)) and all(map(_is_finite, _weights(modules)))

        result = run(*args, **kwargs)
        made = tensors_within(result)
        if sound and any(map(_has_no_number, made)):
            found.append(sentence)
        return result

    return call


def _weights(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def _is_finite(x: Tensor) -> bool:
    if not x.is_floating_point():
        return True
    finite = x.float().isfinite()
    return bool(finite.all())


def _has_no_number(x: Tensor) -> bool:
    """Return True if a result holds NaN or infinity; -inf beside numbers bans a token."""
    if not x.is_floating_point() or not x.numel():
        return False
    wide = x.float()
    wrong = wide.isnan() | wide.isposinf()
    banned = wide.isneginf()
    return bool(wrong.any() or banned.all())


def _sentence(replacement: Replacement, name: str) -> str:
    """Return the sentence about a replacement that makes NaN or infinity of finite numbers."""
    state = host_state()
    target = replacement.target
    op_name = None if target is None else op_name_of(target, state)
    plugin = replacement.plugin or ""
    setting = choosing(state.settings(), op_name, [NATIVE_CHOICE], plugin)
    return printable(
        f"{name} of {replacement.provider} at {replacement.location} makes NaN or infinity of "
        f"finite numbers; to go without it: {setting}"
    )


def _advice(binding: Binding) -> str:
    choice = binding.replacement
    plugin = None if choice.winner is None else choice.winner.plugin
    names = [NATIVE_CHOICE]
    setting = choosing(choice.settings, choice.op_name, names, plugin or "")
    return f"to go without it: {setting}"
