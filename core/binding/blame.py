"""Find the kernel that makes NaN or infinity: run a model's kernels beside native definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from traceback import walk_tb
from typing import Any

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.binding.comparison import leaves, tensors_within
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.form_choice import choice_of
from opgraft.binding.functional import FUNCTIONALS, Functional
from opgraft.binding.names import op_name_of
from opgraft.binding.provenance import explain_exception
from opgraft.binding.shadow import Shadow
from opgraft.binding.specialisation import Binding, binding_with_shadow, native_of, without_compiler
from opgraft.config import NATIVE_CHOICE, OpgraftConfig, ShadowConfig, set_config
from opgraft.errors import OpgraftError, PluginError
from opgraft.registry.choice import choosing
from opgraft.registry.declarations import Replacement
from opgraft.registry.op_classes import definer, location_of
from opgraft.registry.state import host_state
from torch import Tensor, nn

UNEXPLAINED = "unexplained"
"""The verdict if a model makes NaN or infinity and no kernel is to blame."""
SEARCHED = 2
"""The number of searched texts of a batch: each search computes a whole text again."""
_ALWAYS = ShadowConfig(share=1.0, first_call=True)
_FORWARD = "forward"
_OF_WEIGHTS = "quant_method"
"""The attribute of a layer that holds its weight method."""
_APPLIED = ("apply", "embedding")
"""The computing methods of a weight method."""
_MAKES_NAN = "makes NaN or infinity of finite numbers"


class KernelComparison:
    """Kernels of a model beside their native definitions, on the same inputs.

    Attributes:
        culprits: by kernel, a sentence about wrong NaN or infinity, in the order of the calls.
        differing: by kernel, a sentence about numbers that differ, in the order of the calls.
        misshapen: by kernel, a sentence about results of another dtype, shape or number, likewise.
        native: the kernels whose native definitions run instead.
    """

    def __init__(self) -> None:
        self.culprits: dict[str, str] = {}
        self.differing: dict[str, str] = {}
        self.misshapen: dict[str, str] = {}
        self.native: set[str] = set()

    def goes_wrong(self, passes: Callable[[], Iterable[Any]]) -> bool:
        """Run passes of a model until one makes NaN or infinity, and return True if one does.

        Later passes are left out: they would read NaN from a cache.
        """
        self.culprits.clear()
        self.differing.clear()
        return any(map(_holds_no_number, passes()))


class _QuietShadow(Shadow):
    """A shadow for a comparison: findings go there, and not into the log."""

    def __init__(
        self, binding: Binding, op: str, native: Any, location: str, found: KernelComparison
    ) -> None:
        target = binding.replacement.target
        kernel = binding.kernel_name
        provider = binding.provider
        super().__init__(target, op, kernel, provider, native, _ALWAYS)
        self._found = found
        self._place = f"{kernel} of {provider} at {location}"
        self._advice = _advice(binding)

    def _watched(
        self,
        run: Callable[..., Any],
        native: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compare a call. Without a way to compare, NaN from finite numbers is a finding."""
        if self._place in self._found.native:
            return native(*args, **kwargs)
        sound = _is_sound(args, kwargs)
        skipped = self.skipped.total()
        result = super()._watched(run, native, args, kwargs)
        is_compared = self.skipped.total() == skipped
        if is_compared or not sound:
            return result
        left = (args, kwargs, result)
        if _holds_no_number(left):
            told = f"{self._place} {_MAKES_NAN}; {self._advice}"
            sentence = printable(told)
            self._found.culprits.setdefault(self._place, sentence)
        return result

    def _compare(
        self, given: dict[str, Any], copies: dict[str, Any], result: Any, expected: Any
    ) -> None:
        self.first_drift = ""
        super()._compare(given, copies, result, expected)
        if not self.first_drift:
            return
        differs = f"differs from the native definition of op {self.op}: {self.first_drift}"
        sentence = printable(f"{self._place} {differs}; {self._advice}")
        ours = tensors_within((result, given))
        theirs = tensors_within((expected, copies))
        if _forms(result) != _forms(expected):
            self._found.misshapen.setdefault(self._place, sentence)
        lost = map(_loses_numbers, ours, theirs)
        if any(lost):
            self._found.culprits.setdefault(self._place, sentence)
        else:
            self._found.differing.setdefault(self._place, sentence)

    def _report(self) -> None:
        """Log nothing: the comparison is told."""


def culprit_of(
    model: nn.Module, passes: Callable[[], Iterable[Any]], *, may_repeat: bool = True
) -> str:
    """Run passes once more, and name the kernel that makes NaN or infinity.

    A kernel is to blame for NaN or infinity that its native definition does not make on the same
    inputs. Kernels with other numbers than their native definitions are left out, one after
    another: a kernel is to blame if the passes go well without it.

    Args:
        model: its kernels are compared.
        passes: returns the results of passes of the model, one after another.
        may_repeat: run the passes a second time, if this process alone may decide to.

    Returns:
        A sentence about the first kernel that is wrong; ``UNEXPLAINED`` if none is; empty if the
        passes make neither NaN nor infinity this time.
    """
    with beside_native_definitions(model) as found:
        try:
            verdict = _culprit_of(passes, found, may_repeat)
        # The model has gone wrong already, and this search must not hide the first error.
        except Exception as error:
            logger.debug("computing a text once more raised %s", described(error))
            culprits = list(found.culprits.values())
            return culprits[0] if culprits else ""
    if verdict == UNEXPLAINED:
        return _constant_without_number(model) or UNEXPLAINED
    return verdict


def misshapen_by(
    error: Exception, model: nn.Module, passes: Callable[[], Iterable[Any]]
) -> PluginError | None:
    """Return an error with the name of the kernel that has made a model raise ``error``.

    The passes are computed once more. A kernel is to blame if the result has another dtype or shape
    than the result of the native definition. If there is none, and code of the model raised
    ``error``, then ``error`` gets a note about the first replacement that has no native definition.

    Returns:
        The error; ``None`` if no kernel is to blame.
    """
    # An error of opgraft tells its cause itself.
    if isinstance(error, OpgraftError) or not host_state().active:
        return None
    told = explain_exception(error)
    if told is not None and told.of_plugin:
        return None
    with beside_native_definitions(model) as found:
        try:
            found.goes_wrong(passes)
        # The passes have raised before.
        except Exception as again:
            logger.debug("computing a step once more raised %s", described(again))
    for place, sentence in found.misshapen.items():
        return PluginError(f"{described(error)}: {sentence}", place.rpartition(" at ")[2])
    uncompared = next(_uncompared(model), None)
    # Code of the model may have received a wrong value, and other code has not.
    if uncompared is not None and _is_raised_within(model, error):
        notes = getattr(error, "__notes__", [])
        # As add_note does, which Python 3.10 lacks.
        vars(error)["__notes__"] = [*notes, f"Besides, {_in_use(uncompared)}"]
    return None


def _is_raised_within(model: nn.Module, error: Exception) -> bool:
    """Return True if a method of the model or of a layer was running."""
    modules = set(map(id, model.modules()))
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any(id(frame.f_locals.get("self")) in modules for frame in frames)


def _uncompared(model: nn.Module) -> Iterator[Replacement]:
    """Yield the replacements in a model whose results no native definition tells."""
    for module in model.modules():
        method = getattr(module, _OF_WEIGHTS, None)
        found = [_replacement_of(type(module)), _replacement_of(type(method))]
        if isinstance(module, CustomOp) and not _is_comparable(without_compiler(module.binding)):
            found.append(module.binding.replacement.winner)
        yield from (each for each in found if each is not None)


def _is_comparable(binding: Binding) -> bool:
    target: Any = binding.replacement.target
    return native_of(binding) is not None and target.repeatable


def _constant_without_number(model: nn.Module) -> str:
    """Return a sentence about a replaced op with a constant that is NaN; empty if none has one.

    A native definition reads the same constants, so no comparison finds them. Infinity may be
    meant, as a limit.
    """
    for op in model.modules():
        winner = op.binding.replacement.winner if isinstance(op, CustomOp) else None
        if winner is None:
            continue
        for name, value in vars(op).items():
            if isinstance(value, float) and math.isnan(value):
                place = f"{winner.cls.__qualname__} of {winner.provider} at {winner.location}"
                told = f"{name} of {place} is NaN; to go without it: {_setting(winner)}"
                return printable(told)
    return ""


def _forms(value: Any) -> list[tuple[Any, ...]]:
    """List the place of each part of a value with its dtype and shape, or its type."""
    forms: list[tuple[Any, ...]] = []
    for place, leaf in leaves(value):
        is_tensor = isinstance(leaf, Tensor)
        forms.append((place, leaf.dtype, leaf.shape) if is_tensor else (place, type(leaf)))
    return forms


def _culprit_of(
    passes: Callable[[], Iterable[Any]], found: KernelComparison, may_repeat: bool
) -> str:
    if not found.goes_wrong(passes):
        return ""
    while may_repeat:
        differing = [each for each in found.differing if each not in found.culprits]
        if not differing:
            break
        kernel = differing[0]
        sentence = found.differing[kernel]
        # From here on, the native definition runs in place of the kernel.
        found.native.add(kernel)
        if not found.goes_wrong(passes):
            return sentence
    culprits = list(found.culprits.values())
    return culprits[0] if culprits else UNEXPLAINED


def verdicts_on(search: Callable[[int], str], number: int) -> list[str]:
    """Return the verdicts on texts of one batch. Only the first few texts are searched.

    The other texts share the verdict, or are unexplained if one of the searched texts is.

    Args:
        search: returns the verdict on a text, by its number.
        number: of texts.
    """
    searched = min(number, SEARCHED)
    others = number - searched
    verdicts = []
    for index in range(searched):
        verdict = search(index)
        verdicts.append(verdict)
    if not others:
        return verdicts
    shared = UNEXPLAINED if UNEXPLAINED in verdicts else verdicts[-1]
    return [*verdicts, *[shared] * others]


def replaced_among(parts: Iterable[object]) -> str:
    """Name the first object of a replacement class among some objects; empty if there is none."""
    for part in parts:
        replacement = _replacement_of(type(part))
        if replacement is not None:
            return _in_use(replacement)
    return ""


def replaced_owner(model: nn.Module, missing: Iterable[str], unplaced: Iterable[str]) -> str:
    """Name the first plugin's layer whose tensors have other names than those of its native class.

    Args:
        model: the model with the layers.
        missing: the names of tensors of the model that a checkpoint lacks.
        unplaced: the names of tensors of the checkpoint, as models spell them, without a place.

    Returns:
        A sentence; empty if there is no such layer.
    """
    layers = dict(model.named_modules())
    # A layer that lacks a tensor, and has no place for another one, calls that one otherwise.
    paths = {name.rpartition(".")[0] for name in unplaced}
    for name in missing:
        path, _, _ = name.rpartition(".")
        layer = layers.get(path) if path in paths else None
        winner = layer.binding.replacement.winner if isinstance(layer, CustomOp) else None
        if winner is None or winner.target is None:
            continue
        if definer(winner.cls, "__init__", above=winner.target) is not None:
            return _in_use(winner)
    return ""


def _in_use(replacement: Replacement) -> str:
    return f"a replaced class is in use: {_class_with_advice(replacement)}"


def replacement_of_layer(layer: nn.Module) -> str:
    """Name the replacement class of a layer, or of its weight method; empty if neither is one."""
    method = getattr(layer, _OF_WEIGHTS, None)
    for cls in (getattr(layer, "op_class", type(layer)), type(method)):
        replacement = _replacement_of(cls)
        if replacement is not None:
            return _class_with_advice(replacement)
    return ""


def _class_with_advice(replacement: Replacement) -> str:
    place = f"{replacement.provider} at {replacement.location}"
    advice = f"to go without it: {_setting(replacement)}"
    return printable(f"{replacement.cls.__qualname__} of {place}; {advice}")


def fault_of_class(cls: type, fault: str) -> PluginError:
    """Return an error about a replacement class of a plugin.

    Args:
        cls: the class.
        fault: a verb and more, such as "returned None".
    """
    replacement = _replacement_of(cls)
    if replacement is None:
        return PluginError(f"{cls.__qualname__} at {location_of(cls)} {fault}")
    name = f"{cls.__qualname__} of {replacement.provider} at {replacement.location}"
    told = f"{name} {fault}; to go without it: {_setting(replacement)}"
    return PluginError(printable(told), replacement.location)


@contextmanager
def beside_native_definitions(model: nn.Module) -> Iterator[KernelComparison]:
    """Within the block, compare the kernels of a model with native definitions on the same inputs.

    Ops and functional forms are compared. A layer made of other ops keeps state, and a weight
    method has no native definition: replacements of these are findings if NaN or infinity comes
    from finite numbers.

    Yields:
        The findings, which grow as the model runs.
    """
    found = KernelComparison()
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


def _watch_op(op: CustomOp, found: KernelComparison, undo: ExitStack) -> None:
    """Compare the calls of an op, or look at the results only if no comparison is possible."""
    bound = op.binding
    if _FORWARD in vars(op) or type(op) is not op.bound_class:
        return
    binding = without_compiler(bound)
    native = native_of(binding)
    if native is None or not _is_comparable(binding):
        _watch_replacement(op, found, undo)
        return
    target: Any = binding.replacement.target
    state = host_state()
    name = op_name_of(target, state) or target.__qualname__
    location = binding.kernel.winner.location
    shadow = _QuietShadow(binding, name, native.definition, location, found)
    # The class of the one op changes: other models keep their kernels.
    op._adopt(binding_with_shadow(binding, shadow))
    undo.callback(op._adopt, bound)


def _watch_forms(found: KernelComparison) -> None:
    """Compare the calls of forms without a native kernel, within the current scope."""
    caches = host_state().current_caches()
    for form in FUNCTIONALS.values():
        call = _compared_form(form, found)
        if call is not None:
            caches.functions[form] = call, None


def _compared_form(
    form: Functional[..., Any], found: KernelComparison
) -> Callable[..., Any] | None:
    """Return the kernel of a form with a comparison around it; ``None`` if the kernel is native."""
    try:
        choice = choice_of(form)
    # No model can call the form either.
    except OpgraftError:
        return None
    if choice.is_native:
        return None
    binding = choice.binding
    functions = binding.kernel.winner.functions or {}
    function = functions[form.name]
    location = location_of(function)
    shadow = _QuietShadow(binding, form.op, form.native, location, found)
    return shadow.around(function, form.native)


def _watch_replacement(layer: CustomOp, found: KernelComparison, undo: ExitStack) -> None:
    """Look at the results of the replacement of a layer."""
    binding = layer.binding
    replacement = binding.replacement.winner
    if replacement is None:
        return
    sentence = _sentence(replacement, binding.kernel_name)
    call = _numbers_expected(layer.forward, layer, sentence, found)
    _hide(layer, _FORWARD, call, undo)


def _watch_weight_method(layer: nn.Module, found: KernelComparison, undo: ExitStack) -> None:
    """Look at the results of the replacement of a layer's weight method."""
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
    """Put a function before a method of one object, until ``undo`` closes."""
    vars(owner)[name] = call
    undo.callback(vars(owner).pop, name)


def _numbers_expected(
    run: Callable[..., Any], layer: nn.Module, sentence: str, found: KernelComparison
) -> Callable[..., Any]:
    """Return ``run`` with a look at results: NaN or infinity from finite numbers is a finding."""

    def call(*args: Any, **kwargs: Any) -> Any:
        sound = _is_sound((layer, *args), kwargs)
        result = run(*args, **kwargs)
        if sound and _holds_no_number(result):
            found.culprits.setdefault(sentence, sentence)
        return result

    return call


def _is_sound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if arguments hold finite numbers, and layers among them finite weights."""
    # A layer may be handed another one for its weights, as the head of a decoder is.
    modules = [each for each in args if isinstance(each, nn.Module)]
    given = tensors_within((args, kwargs))
    if not all(map(_is_finite, given)):
        return False
    weights = _weights(modules)
    return all(map(_is_finite, weights))


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
    banned = wide.isneginf()
    if banned.all():
        return True
    wrong = wide.isnan() | wide.isposinf()
    return bool(wrong.any())


def _holds_no_number(value: Any) -> bool:
    return any(map(_has_no_number, tensors_within(value)))


def _loses_numbers(got: Tensor, expected: Tensor) -> bool:
    """Return True if a result has NaN or infinity where another one has numbers."""
    if not (got.is_floating_point() and expected.is_floating_point()):
        return False
    ours = got.float()
    theirs = expected.float()
    lost = ~ours.isfinite()
    right = theirs.isfinite()
    if lost.shape == right.shape:
        lost &= right
        return bool(lost.any())
    if not lost.any():
        return False
    return bool(right.all())


def _sentence(replacement: Replacement, name: str) -> str:
    """Return the sentence about a replacement with NaN or infinity from finite numbers."""
    place = f"{name} of {replacement.provider} at {replacement.location}"
    setting = _setting(replacement)
    return printable(f"{place} {_MAKES_NAN}; to go without it: {setting}")


def _setting(replacement: Replacement) -> str:
    """Return the setting to go without a replacement."""
    state = host_state()
    target = replacement.target
    op_name = None if target is None else op_name_of(target, state)
    settings = state.settings()
    plugin = replacement.plugin or ""
    names = [NATIVE_CHOICE]
    return choosing(settings, op_name, names, plugin)


def _advice(binding: Binding) -> str:
    choice = binding.replacement
    plugin = None if choice.winner is None else choice.winner.plugin
    names = [NATIVE_CHOICE]
    setting = choosing(choice.settings, choice.op_name, names, plugin or "")
    return f"to go without it: {setting}"
