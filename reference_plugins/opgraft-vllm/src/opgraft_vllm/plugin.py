"""The entry point of vLLM, called in each of its processes."""

from __future__ import annotations

import importlib

import opgraft
from vllm.platforms import current_platform

from opgraft_vllm.report import REPORT

WITHOUT_EXTENSION_POINT = {
    "Sampler": "vLLM's model runner builds it, so vLLM samples",
    "FusedMoE": "not offered yet, so vLLM runs the experts",
}
"""Parts of vLLM that keep their own kernels."""


def register() -> None:
    """Register opgraft's kernels with vLLM.

    Raises:
        OpgraftError: a setting, a plugin that was asked for, or the lockfile prevents a choice.
    """
    ours = opgraft.current_platform().device_type
    theirs = current_platform.device_type
    if ours != theirs:
        REPORT.left["all"] = f"opgraft's platform computes on {ours}, and vLLM's on {theirs}"
        return
    REPORT.left.update(WITHOUT_EXTENSION_POINT)
    # Layers of vLLM take seconds to import, which a process without kernels does not need.
    importlib.import_module("opgraft_vllm.weights").replace_layers()
    importlib.import_module("opgraft_vllm.ops").replace_ops()
    if ours == "cpu":
        importlib.import_module("opgraft_vllm.attention").replace_attention()
