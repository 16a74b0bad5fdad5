"""Attention backends of ``vllm.v1.attention``, as base classes for plugins.

No backend runs here. To run on opgraft, a vendor's attention replaces ``Attention``.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from opgraft import init_logger

from opgraft_vllm_bridge.vllm_parts.forward_context import CommonAttentionMetadata

logger = init_logger("opgraft.vllm_bridge")

Metadata = TypeVar("Metadata")


class AttentionType(str, enum.Enum):
    """Kinds of attention."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionBackendEnum(enum.Enum):
    """Names of backends. A plugin registers its own as ``CUSTOM``."""

    CUSTOM = "custom"


class AttentionMetadata:
    """Base of the metadata of a batch."""


class AttentionBackend(ABC):
    """The description of a backend: its classes, and the shape of its cache."""

    accept_output_buffer: bool = False

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Return the name of the backend."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[Any]:
        """Return the class that computes attention."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that makes metadata."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache."""


class AttentionImpl(ABC, Generic[Metadata]):
    """The computation of a backend."""


class AttentionMetadataBuilder(ABC, Generic[Metadata]):
    """Makes the metadata of a backend from a ``CommonAttentionMetadata``."""

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        """Return the metadata of a batch."""


REGISTERED: dict[AttentionBackendEnum, str | type] = {}
"""Name → the backend that a plugin has registered, a dotted path or a class."""


def register_backend(
    backend: AttentionBackendEnum,
    class_path: str | None = None,
    is_mamba: bool = False,
) -> Callable[[type], type]:
    """Register a backend, and log that it has no effect on opgraft.

    With a path, this registers the backend. Without a path, this returns a decorator for the class.
    """

    def register(cls: type) -> type:
        _note(backend, cls)
        return cls

    if class_path is not None:
        _note(backend, class_path)
        return lambda cls: cls
    return register


def _note(backend: AttentionBackendEnum, registered: str | type) -> None:
    REGISTERED[backend] = registered
    logger.warning(
        "an attention backend of vLLM is registered as %s, to no effect: attention is opgraft's, "
        "which plugins replace",
        backend.name,
    )
