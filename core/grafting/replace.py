"""Replacing modules by ops in place, and putting them back."""

from __future__ import annotations

from contextlib import ExitStack

from opgraft.binding.arguments import expect_module
from opgraft.errors import GraftError
from opgraft.grafting import exchange, forwards
from opgraft.grafting.exchange import install, original_of, put_back
from opgraft.grafting.forwards import (
    permanent_substitutions,
    restore_forward,
    substitute,
    substitutions_of,
)
from opgraft.grafting.obstacles import is_sharded
from opgraft.grafting.plan import Plan, plan_of
from opgraft.grafting.report import GraftReport
from opgraft.plugins.host import load_plugins
from torch import nn


def graft(model: nn.Module, *, dry_run: bool = False) -> GraftReport:
    """Replace, in place, the modules below ``model`` that adapters recognise, by ops with the same parameters.

    Adapters of plugins are asked first, then the built-in ones: torch's LayerNorm, RMSNorm, GELU, SiLU, ReLU and
    Linear, and modules of any origin that compute a layer norm, an RMS norm with or without a weight or a gate, Gemma's
    RMS norm, one of the GELU, SiLU and ReLU forms, or a linear map whose weight lies the other way round. Modules that
    combine linear layers with an activation, a gate, a residual or a norm are replaced as a whole. Attention modules
    of transformers that use ``sdpa`` get an attention op, and where ``apply_rotary_emb`` has a kernel beyond its native
    definition, an op for the rotary function that their forward calls. Modules of any origin whose forward calls
    ``scaled_dot_product_attention`` by a name of its file get an op where that has a kernel beyond torch's function.
    Experts with the weights of all in two parameters become one op. Mixers of state spaces get ops for the functions
    of their file by which they convolve and scan; where a gradient is required, those functions run.

    Parameters and buffers stay the same objects, names in the ``state_dict`` stay, and so do ties and optimizers. The
    weights that a gated MLP computes at once are moved next to each other, each in a storage of its own. Code that asks
    for a module's exact class, such as libraries for fine-tuning, runs before grafting or after ``ungraft``. No other
    thread may run a model meanwhile: tracing patches ``torch.nn.Module`` for an instant. What is patched into the file
    of a model later does not reach forwards that call an op, as of attention, before ``ungraft``.

    Public attributes of a module can be read from its op. ``eps`` and ``variance_epsilon`` of norms can be set too;
    what is written to an attribute that only the module's own forward reads, under any other name, has no effect
    before ``ungraft``. An op takes its input by position, whatever the module called it. Under autocast an RMS norm
    returns its input's dtype, where norms that multiply by a float32 weight last return float32.

    Args:
        model: what to change.
        dry_run: decide and report only, and leave the model as it is.

    Returns:
        What was replaced by which implementation of which provider, and what was left alone and why. The model itself
        is never replaced, only what is below it.

    Raises:
        OpgraftError: a setting or a conflict prevents choosing an implementation.
        GraftError: in strict mode, an adapter or the class of an op raised.
        WeightError: the hook of an op for weights that are loaded raised. Whatever is raised, the model is as before.
    """
    expect_module("graft", model)
    load_plugins()
    plan = plan_of(model)
    if not dry_run:
        with ExitStack() as undo:
            _apply(plan, undo)
            undo.pop_all()
    return plan.report(applied=not dry_run)


def _apply(plan: Plan, undo: ExitStack) -> None:
    """Carry out a plan; ``undo`` takes it back."""
    for place in plan.places:
        undo.callback(
            place.parent._modules.__setitem__, place.name, place.parent._modules[place.name]
        )
        place.parent._modules[place.name] = place.op
    for row in plan.exchanges():
        undo.callback(put_back, row.op)
        install(row.op, row.module, row.path)
    for call in plan.calls():
        undo.callback(restore_forward, call.module, substitutions_of(call.module))
        substitute(call.module, call.op, call.substitution)


def ungraft(model: nn.Module) -> None:
    """Put the modules that ``graft`` replaced back in their places: the same objects, with what the ops hold now.

    Parameters, buffers and the training flag come from the ops, and so do numbers and strings that were written to
    their attributes: a model that was trained, moved or loaded in between keeps its state. Hooks that were registered
    on ops go with them, and packed weights are plain again. Layers that a model is made with stay,
    such as the attention of one that runs through transformers. It may be called on a copy of a grafted model, and on
    a model that was never grafted, which it leaves as it is.

    Raises:
        GraftError: ``model`` itself is an op that stands for a module, or other code has sharded or parallelized ops
            in a way that their modules would not take over; nothing has changed then. Or an op lost parameters that its
            module has; modules before that one are back then, and calling it again goes on.
    """
    expect_module("ungraft", model)
    if original_of(model) is not None:
        raise GraftError(
            f"ungraft was given {type(model).__name__}, itself an op in the place of a module: pass the model it is in"
        )
    for module in model.modules():
        exchange.check_restorable(module)
        forwards.check_restorable(module)
    _restore_children(model, {}, is_sharded(model))


def _restore_children(
    parent: nn.Module, restored: dict[nn.Module, nn.Module], sharing: bool
) -> None:
    restore_forward(parent, permanent_substitutions(parent))
    for name, child in list(parent._modules.items()):
        if child is None:
            continue
        if child not in restored:
            restored[child] = put_back(child, sharing)
            _restore_children(restored[child], restored, sharing)
        parent._modules[name] = restored[child]
