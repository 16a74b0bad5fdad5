"""The entry point of vLLM, called in each of its processes."""

from __future__ import annotations

import importlib
import logging
import multiprocessing

import opgraft
from opgraft.plugins.bridges import described
from vllm.platforms import current_platform

from opgraft_vllm.report import REPORT

WITHOUT_EXTENSION_POINT = {
    "Sampler": "vLLM's model runner builds it, so vLLM samples",
    "FusedMoE": "not offered yet, so vLLM runs the experts",
}
"""Parts of vLLM that keep their own kernels."""

REPLACED = {
    "weights": "replace_layers",
    "ops": "replace_ops",
    "attention": "replace_attention",
}
"""Module with replacements → the function that registers them."""


def register() -> None:
    """Register opgraft's kernels with vLLM.

    Raises:
        OpgraftError: a setting, a plugin that was asked for, or the lockfile prevents a choice.
    """
    # vLLM calls this in its workers, too. They are children of the process that the user started.
    if multiprocessing.parent_process() is None:
        REPORT.remove_old()
    ours = opgraft.current_platform().device_type
    theirs = current_platform.device_type
    if ours != theirs:
        REPORT.leave("all", f"opgraft's platform computes on {ours}, and vLLM's on {theirs}")
        return
    for part, reason in WITHOUT_EXTENSION_POINT.items():
        REPORT.leave(part, reason)
    for name, function in REPLACED.items():
        if name == "attention" and ours != "cpu":
            continue
        try:
            # A late import: vLLM's layers take seconds to import.
            module = importlib.import_module(f"opgraft_vllm.{name}")
            getattr(module, function)()
        # Another version of vLLM may lack a name.
        except (ImportError, AttributeError) as error:
            REPORT.leave(name, f"this version of vLLM is not the tried one: {described(error)}")
    # vLLM shows messages of its own loggers and of their children only.
    replaced = ", ".join(row.told["op"] for row in REPORT.rows) or "nothing"
    logging.getLogger("vllm.opgraft").info("opgraft's kernels replace %s", replaced)
