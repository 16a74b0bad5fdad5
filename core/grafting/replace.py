"""Replacing modules by ops in place, and putting them back."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from opgraft.adapter import Adapter, LeaveAlone
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.specialisation import op_name_of
from opgraft.decision import Provider
from opgraft.errors import GraftError, OpgraftError
from opgraft.grafting import attention, rotary
from opgraft.grafting.adapters import builtin_adapters
from opgraft.grafting.exchange import build_op, original_of, put_back
from opgraft.grafting.report import GraftReport, LeftAlone, Part, Replaced
from opgraft.ops import ApplyRotaryEmb, ScaledDotProductAttention
from opgraft.ops.checks import expect_module
from opgraft.ops.composites.composite import Composite, served_by
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import load_plugins
from opgraft.state import host_state
from opgraft.text import described
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (nn.Parameter, type(None))
_READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def graft(model: nn.Module) -> GraftReport:
    """Replace, in place, the modules below ``model`` that adapters recognise, by ops with the same parameters.

    Adapters of plugins are asked first, then the built-in ones: torch's LayerNorm, RMSNorm, GELU, SiLU and Linear, and
    modules of any origin that compute an RMS norm, Gemma's RMS norm or one of the GELU and SiLU forms. Modules that
    combine linear layers with an activation, a gate, a residual or a norm are replaced as a whole. Attention modules
    of transformers that use ``sdpa`` get an attention op, and where ``apply_rotary_emb`` has a kernel beyond its native
    definition, an op for the rotary function that their forward calls.

    Parameters and buffers stay the same objects, names in the ``state_dict`` stay, and so do ties and optimizers; the
    weights that a gated MLP computes at once become views of one storage. Code that asks for a module's exact class,
    such as libraries for fine-tuning, runs before grafting or after ``ungraft``. No other thread may run a model
    meanwhile: tracing patches ``torch.nn.Module`` for an instant.

    Public attributes of a module can be read from its op. ``eps`` and ``variance_epsilon`` of norms can be set too;
    what is written to an attribute that only the module's own forward reads, under any other name, has no effect
    before ``ungraft``. An op takes its input by position, whatever the module called it. Under autocast an RMS norm
    returns its input's dtype, where norms that multiply by a float32 weight last return float32.

    Returns:
        What was replaced by which implementation of which provider, and what was left alone and why. The model itself
        is never replaced, only what is below it.

    Raises:
        OpgraftError: a setting or a conflict prevents choosing an implementation.
        GraftError: in strict mode, an adapter or the class of an op raised. Whatever is raised, the model is as before.
    """
    expect_module("graft", model)
    load_plugins()
    with ExitStack() as undo:
        run = _Run(model, undo)
        if not model._modules:
            run.leave("", model, "it is the model itself, which has no parent to be replaced in")
        run.children_of(model, "")
        run.attention_of(model)
        run.rotary_of(model)
        undo.pop_all()
    return GraftReport(tuple(run.replaced), tuple(run.left_alone))


def ungraft(model: nn.Module) -> None:
    """Put the modules that ``graft`` replaced back in their places: the same objects, with what the ops hold now.

    Parameters, buffers and the training flag come from the ops, and so do numbers and strings that were written to
    their attributes: a model that was trained, moved or loaded in between keeps its state. Hooks that were registered
    on ops go with them, and weights that ``pack`` has packed are plain again. It may be called on a copy of a grafted
    model, and on a model that was never grafted, which it leaves as it is. A configuration that grafted models share
    gets transformers' own attention back for all of them.

    Raises:
        GraftError: ``model`` itself is an op that stands for a module, or an op lost parameters that its module has;
            modules before that one are back then, and calling it again goes on.
    """
    expect_module("ungraft", model)
    if original_of(model) is not None:
        raise GraftError(
            f"ungraft was given {type(model).__name__}, itself an op in the place of a module: pass the model it is in"
        )
    _restore_children(model, {})


def _restore_children(parent: nn.Module, restored: dict[nn.Module, nn.Module]) -> None:
    attention.detach(parent)
    rotary.detach(parent)
    for name, child in list(parent._modules.items()):
        if child is None:
            continue
        if child not in restored:
            restored[child] = put_back(child)
            _restore_children(restored[child], restored)
        parent._modules[name] = restored[child]


class _Run:
    """One call of ``graft``: walks the model bottom-up and writes down what becomes of each module."""

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        self.own = discover().provider_of(__name__)
        self.adapters: list[tuple[Provider, Adapter]] = [*host_state().graft_adapters]
        self.adapters += [(self.own, adapter) for adapter in builtin_adapters(_usual_dtype(model))]
        self.strict = host_state().settings().config.strict
        self.undo = undo
        self.fenced = _fenced(model)
        self.device = next((p.device for p in model.parameters()), torch.get_default_device())
        self.settled: dict[nn.Module, nn.Module] = {}
        self.replaced: list[Replaced] = []
        self.left_alone: list[LeftAlone] = []

    def children_of(self, parent: nn.Module, prefix: str) -> None:
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in self.settled:
                self.settled[child] = self._settle(child, prefix + name)
            if self.settled[child] is not child:
                self.undo.callback(parent._modules.__setitem__, name, child)
                parent._modules[name] = self.settled[child]

    def attention_of(self, model: nn.Module) -> None:
        modules = {path: module for path, module in model.named_modules() if attention.is_attention(module)}
        self.left_alone = [row for row in self.left_alone if row.path not in modules]
        for path, module in [row for row in modules.items() if not attention.is_attached(row[1])]:
            try:
                attention.check(module)
                with self._reporting(f"class {ScaledDotProductAttention.__name__}"):
                    op = ScaledDotProductAttention()
            except LeaveAlone as verdict:
                self.leave(path, module, str(verdict))
            else:
                self.undo.callback(attention.detach, module)
                attention.attach(module, op)
                self.replaced.append(_row(path, module, attention.ADAPTER, op, self.own))

    def rotary_of(self, model: nn.Module) -> None:
        calling = {path: (module, rotary.function_of(module)) for path, module in model.named_modules()}
        for path, (module, name) in calling.items():
            if name is None:
                continue
            try:
                rotary.check(module, name, model)
                with self._reporting(f"class {ApplyRotaryEmb.__name__}"):
                    op = ApplyRotaryEmb()
                if op._binding.kernel.winner.method == "forward_native":
                    raise LeaveAlone("here apply_rotary_emb is its native definition, which is no faster")
            except LeaveAlone as verdict:
                self.left_alone.append(LeftAlone(f"{path}.{name}", name, str(verdict)))
            else:
                self.undo.callback(rotary.detach, module)
                rotary.attach(module, name, op)
                row = _row(f"{path}.{name}", module, rotary.ADAPTER, op, self.own)
                self.replaced.append(dataclasses.replace(row, source=name))

    def _settle(self, module: nn.Module, path: str) -> nn.Module:
        """The op that takes the module's place, or the module itself."""
        if isinstance(module, CustomOp):
            self.leave(path, module, "already an op")
            return module
        if isinstance(module, torch.jit.ScriptModule):
            self.leave(path, module, "it is compiled by TorchScript")
            return module
        self.children_of(module, f"{path}.")
        reason = self.fenced.get(module) or _untouchable(module)
        if reason:
            if not module._modules or module._parameters or parametrize.is_parametrized(module):
                self.leave(path, module, reason)
            return module
        try:
            found = self._recognised(module)
            if found is None:
                return module
            provider, adapter, arguments = found
            with self._reporting(f"class {adapter.op.__qualname__} for adapter {adapter.name!r} of {provider}"):
                op = build_op(adapter.op, arguments, module, self.device)
                self.undo.callback(put_back, op)
        except LeaveAlone as verdict:
            self.leave(path, module, str(verdict))
            return module
        if module._modules:
            self.replaced = [row for row in self.replaced if not row.path.startswith(f"{path}.")]
            self.left_alone = [row for row in self.left_alone if not row.path.startswith(f"{path}.")]
        self.replaced.append(_row(path, module, adapter.name, op, provider))
        return op

    def _recognised(self, module: nn.Module) -> tuple[Provider, Adapter, Mapping[str, Any]] | None:
        for provider, adapter in self.adapters:
            with self._reporting(f"adapter {adapter.name!r} of {provider}"):
                arguments = adapter.recognise(module)
            if arguments is not None:
                return provider, adapter, arguments
        return None

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Turn what a plugin's code raises into a reason for the report, or in strict mode into an error."""
        try:
            yield
        except (LeaveAlone, OpgraftError):
            raise
        except Exception as error:  # whatever a plugin's code raises
            reason = f"{what} raised {described(error)}"
            if self.strict:
                raise GraftError(f"strict mode: {reason}. OPGRAFT_STRICT=0 leaves such modules as they are.") from error
            raise LeaveAlone(reason) from error

    def leave(self, path: str, module: nn.Module, reason: str) -> None:
        self.left_alone.append(LeftAlone(path, type(module).__name__, reason))


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that most of a model's parameters have, by their elements, among those that models compute in."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in _COMPUTED and not is_lazy(parameter):
            elements[parameter.dtype] += parameter.numel()
    return max(elements, key=elements.__getitem__, default=None)


def _fenced(model: nn.Module) -> dict[nn.Module, str]:
    """Modules whose parent reads their weights instead of calling them, with the reason to leave them alone."""
    fenced = {}
    for parent in model.modules():
        if isinstance(parent, _READ_THEIR_CHILDREN):
            reason = f"{type(parent).__name__} reads its weights in fused code"
            fenced.update({module: reason for module in parent.modules() if module is not parent})
        elif parametrize.is_parametrized(parent):
            inside = parent.get_submodule("parametrizations")
            fenced.update(dict.fromkeys(inside.modules(), "it belongs to a parametrization"))
    return fenced


def _untouchable(module: nn.Module) -> str | None:
    """Why a module of whatever class must stay, or ``None``."""
    if parametrize.is_parametrized(module):
        return "it has parametrizations"
    if "forward" in vars(module):
        return "its forward was set on the instance"
    if vars(module).get("_compiled_call_impl"):
        return "it was compiled in place"
    foreign = [f"{name} is a {type(p).__name__}" for name, p in module._parameters.items() if type(p) not in _PLAIN]
    if foreign:
        return f"its {foreign[0]}, which kernels may not take"
    hooks = [name for name in _HOOKS if vars(module).get(name)]
    return f"it has hooks ({hooks[0].strip('_').replace('_', ' ')})" if hooks else None


def _row(path: str, module: nn.Module, adapter: str, op: nn.Module, provider: Provider) -> Replaced:
    source, cls = type(module).__name__, type(op)
    idle = {
        layer.get_submodule(name) for layer in op.modules() if isinstance(layer, Composite) for name in layer.idle()
    }
    inside = [(name, part) for name, part in op.named_modules() if part is not op and isinstance(part, CustomOp)]
    parts = tuple(Part(name, *_served(part)) for name, part in inside if part not in idle)
    if not isinstance(op, CustomOp):
        return Replaced(path, source, adapter, cls.__name__, f"{cls.__qualname__}.forward", provider, parts)
    return Replaced(path, source, adapter, *_served(op), parts)


def _served(op: CustomOp) -> tuple[str, str, Provider]:
    """The name of an op, its kernel, and who provides that."""
    name = op_name_of(op.op_class, host_state()) or op.op_class.__name__
    return name, str(op._binding.kernel.winner), served_by(op)
