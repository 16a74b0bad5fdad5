"""vLLM's constructor of the layer ``Attention``, in ``vllm.model_executor.layers.attention``."""

from __future__ import annotations

from typing import Any

from opgraft import ops
from opgraft.errors import LayerError


class _AttentionClass:
    """Stands for the class ``Attention`` of opgraft, and takes the arguments of vLLM's.

    A class of a plugin may derive from the object, and instances of opgraft's class pass as
    instances of the object. Attributes, such as ``register_oot``, are those of opgraft's class.
    """

    def __call__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        use_alibi_sqrt: bool | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> ops.Attention:
        """Return the layer.

        Args:
            num_heads: as in opgraft's class, and so are all parameters without an entry here.
            alibi_slopes: not supported, and so is ``use_alibi_sqrt``.
            cache_config: the window of all layers, if the layer has no window of its own.
            quant_config: not read. opgraft chooses the cache's dtype by ``cache.dtype``.
            per_layer_sliding_window: the window of this layer.
            attn_type: the kind, ``"decoder"`` alone.
            kv_sharing_target_layer_name: not supported.
            others: further arguments of opgraft's class, such as ``sinks``.

        Raises:
            LayerError: the layer needs something without support.
        """
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "use_alibi_sqrt": use_alibi_sqrt,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            # Members of the enumeration are equal to their texts.
            "attn_type": None if attn_type == "decoder" else attn_type,
        }
        for name, value in unsupported.items():
            if value:
                raise LayerError(f"the layer {prefix!r} is given {name}, and has no use for it")
        window = per_layer_sliding_window
        if window is None:
            window = getattr(cache_config, "sliding_window", None)
        others.setdefault("sliding_window", window)
        return ops.Attention(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            logits_soft_cap=logits_soft_cap,
            prefix=prefix,
            **others,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(ops.Attention, name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (ops.Attention,)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, ops.Attention)

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, ops.Attention)

    # Python evaluates annotations when a function is defined.
    def __or__(self, other: Any) -> Any:
        return ops.Attention | other

    __ror__ = __or__


Attention = _AttentionClass()
