"""Replace classes of vLLM, by vLLM's ``register_oot``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import get_cached_compilation_config, get_current_vllm_config_or_none
from vllm.model_executor.custom_op import op_registry_oot

from opgraft_vllm.operators import digest
from opgraft_vllm.report import REPORT

Forward = Callable[..., Any]


def is_taken(target: type) -> bool:
    """Return True if another plugin of vLLM replaces a class. The report notes the reason."""
    other = op_registry_oot.get(target.__name__)
    if other is None:
        return False
    REPORT.leave(target.__name__, f"{other.__module__}.{other.__qualname__} replaces it")
    return True


def replace_forward(target: Any, ops: tuple[str, ...], forward: Forward) -> None:
    """Replace a class of vLLM by a subclass with another ``forward``.

    ``-name`` in vLLM's ``custom_ops`` leaves a layer to vLLM. ``none`` does not: it is vLLM's
    default for compiled models.

    Args:
        target: the class.
        ops: the names of the ops in opgraft.
        forward: the method. It may call ``target.forward``.
    """
    name = target.name

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        target.__init__(self, *args, **kwargs)
        note_layer()
        self.left_to_vllm = f"-{name}" in get_cached_compilation_config().custom_ops

    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.left_to_vllm:
            return target.forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    register(target, ops, {"__init__": construct, "forward": chosen})


def register(target: Any, ops: tuple[str, ...], namespace: dict[str, Any]) -> None:
    """Register a subclass with these attributes as the replacement of a class of vLLM."""
    name = target.name
    members = {"__module__": __name__, **namespace}
    made: Any = type(f"Opgraft{target.__name__}", (target,), members)
    target.register_oot(made)
    # register_oot renames the op, but users switch the op by its own name.
    made.name = name
    for row in REPORT.rows:
        if row.told["op"] in ops:
            row.told["classes"].append(target.__name__)


def note_layer() -> None:
    """Begin the report, and put opgraft's decisions into the key of vLLM's compile cache.

    Each layer calls this in its constructor. vLLM computes the key when all layers are built, and
    by itself leaves plugins out of the key.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        REPORT.begin(0)
        return
    REPORT.begin(config.parallel_config.data_parallel_index)
    if isinstance(config.additional_config, dict):
        config.additional_config["opgraft"] = digest()
