"""The parts in the order in which they run: the most valuable first, as the last ones may find no time."""

from __future__ import annotations

from on_gpu.runner import Part

PARTS = (
    Part("detection", "what opgraft says of the machine, against torch and nvidia-smi", 40),
    Part("kernels", "every Triton kernel against its reference in float64", 120),
    Part("grafting", "grafted models against plain ones, and the kernels that ran", 60),
    Part("engine", "greedy tokens of the engine, against the CPU and transformers", 70),
    Part("graphs", "tokens and time of the engine, compiled and from static graphs", 100),
    Part("compilation", "grafted models compiled to one graph", 60),
    Part("bandwidth", "speed of each kernel, against a copy, torch.compile and Liger", 70),
    Part("large_model", "a billion weights, one request and 64, against transformers", 75),
    Part("kit", "the conformance kit, tests for a GPU, compute-sanitizer", 200),
)
"""All parts. Their limits add up to more than the run has: a part that needs less leaves the rest to others."""
