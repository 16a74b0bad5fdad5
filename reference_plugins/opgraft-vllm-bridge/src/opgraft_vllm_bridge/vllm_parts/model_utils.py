"""``vllm.model_executor.utils``."""

from __future__ import annotations


def maybe_disable_graph_partition(current_backend: str) -> dict[str, bool]:
    """Return options of ``torch.compile`` for a function of its own, which must stay one graph."""
    return {"graph_partition": False} if current_backend == "inductor" else {}
