"""Options of compilation: ``vllm.model_executor.utils``."""

from __future__ import annotations


def maybe_disable_graph_partition(current_backend: str) -> dict[str, bool]:
    """Return options of ``torch.compile`` that keep a function in one graph."""
    if current_backend == "inductor":
        return {"graph_partition": False}
    return {}
