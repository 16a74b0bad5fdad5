"""``vllm.v1.attention``: of its backends, which do not run here, the names that platforms of plugins import."""

from __future__ import annotations

import enum


class AttentionType(str, enum.Enum):
    """Kinds of attention, by what attends to what."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionBackendEnum(enum.Enum):
    """The backends of vLLM that run here: none."""
