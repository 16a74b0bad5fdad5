"""Replace modules by ops in place, and put the modules back."""

from __future__ import annotations

from contextlib import ExitStack

from opgraft.binding.arguments import expect_module
from opgraft.binding.provenance import kernels_told_when_late
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
from opgraft.grafting.plan import GraftPlan, plan_of
from opgraft.grafting.report import GraftReport
from opgraft.plugins.host import load_plugins
from torch import nn


def graft(model: nn.Module, *, dry_run: bool = False) -> GraftReport:
    """Replace modules below ``model`` by ops with the same parameters, in place.

    Adapters recognise the modules. Rows of plugins are tried before the built-in rows, which know

    - torch's LayerNorm, RMSNorm, GELU, SiLU, ReLU and Linear;
    - modules of any origin that compute a layer norm, an RMS norm with or without a weight or a
      gate, Gemma's RMS norm, a form of GELU, SiLU or ReLU, or a linear map with a transposed
      weight;
    - linear layers with an activation, a gate, a residual or a norm;
    - experts with all weights in two parameters.

    Other modules stay, and their forward calls an op in place of a function:

    - attention modules of transformers with ``sdpa``;
    - modules of any origin that call ``scaled_dot_product_attention`` by a name of their file, if
      the op has a kernel beyond torch's function;
    - attention modules with a rotary function, if ``apply_rotary_emb`` has a kernel beyond the
      native definition;
    - mixers of state spaces with functions of the same file for convolutions and scans. If a
      gradient is required, those functions run.

    Parameters and buffers stay the same objects, names in the ``state_dict`` stay, and so do ties
    and optimizers. Weights of gate and up in a gated MLP are moved next to each other, each in
    a storage of its own. Public attributes of a module can be read from the op. A write to ``eps``
    or ``variance_epsilon`` of a norm counts; a write to an attribute that only the module's own
    forward reads has no effect before ``ungraft``. An op takes the input by position, whatever the
    module called the argument. Under autocast an RMS norm returns the input's dtype; norms that
    multiply by a float32 weight last return float32.

    Code that asks for a module's exact class, such as ``quantize_dynamic``, runs before ``graft``
    or after ``ungraft``. ``isinstance`` finds ops by torch's classes and by transformers' Conv1D.
    No other thread may run a model during ``graft``: tracing patches ``torch.nn.Module`` for an
    instant. A later patch in the file of a model does not reach a forward that calls an op, before
    ``ungraft``.

    Args:
        model: to change.
        dry_run: decide and report only, and leave the model unchanged.

    Returns:
        The replaced modules with implementation and provider, and the other modules with a reason.
        The model itself is never replaced.

    Raises:
        OpgraftError: a setting or a conflict prevents the choice of an implementation.
        GraftError: in strict mode, an adapter or the class of an op raised.
        WeightError: the hook of an op for loaded weights raised. After any exception the model is
            as before.
    """
    expect_module("graft", model)
    load_plugins()
    with kernels_told_when_late():
        plan = plan_of(model)
        if not dry_run:
            # An exception on the way takes back all changes so far.
            with ExitStack() as undo:
                _apply(plan, undo)
                undo.pop_all()
    return plan.report(applied=not dry_run)


def _apply(plan: GraftPlan, undo: ExitStack) -> None:
    """Carry out a plan; ``undo`` takes the changes back."""
    for place in plan.places:
        children = place.parent._modules
        undo.callback(children.__setitem__, place.name, children[place.name])
        children[place.name] = place.op

    for row in plan.exchanges():
        # The undo comes first: a hook for loaded weights may raise within install.
        undo.callback(put_back, row.op)
        install(row.op, row.module, row.path)

    for call in plan.calls():
        undo.callback(restore_forward, call.module, substitutions_of(call.module))
        substitute(call.module, call.op, call.substitution)


def ungraft(model: nn.Module) -> None:
    """Put the modules that ``graft`` replaced back, with the state that the ops have now.

    The modules are the same objects as before. Parameters, buffers and the training flag come from
    the ops, and so do numbers and strings from changed attributes: a model that was
    trained, moved or loaded in between keeps that state. Hooks on ops go with the ops, and packed
    weights are plain again. Layers that a model was constructed with stay, such as the attention
    of a model that runs through transformers. A copy of a grafted model can be ungrafted too. A
    model that was never grafted stays unchanged.

    Raises:
        GraftError: ``model`` itself is an op in place of a module, or other code has sharded or
            parallelized ops in a way that the modules cannot take over; nothing has changed then.
            Or an op lost parameters of the module; modules before that one are back then, and a
            second call goes on.
    """
    expect_module("ungraft", model)
    if original_of(model) is not None:
        raise GraftError(
            f"ungraft was given {type(model).__name__}, itself an op in the place of a module: "
            "pass the model it is in"
        )

    # First check everything, so that an error leaves the model unchanged.
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
        # A module in several places comes back once.
        if child not in restored:
            restored[child] = put_back(child, sharing)
            _restore_children(restored[child], restored, sharing)
        parent._modules[name] = restored[child]
