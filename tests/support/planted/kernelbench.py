"""The kinds of cheats that KernelBench tries on its own harness, as plugins for CPUs.

The kinds are those of its adversarial tests and of its static checker (``test_eval_adversarial.py``,
``test_level1_hacks.py`` and ``kernel_static_checker.py``). The code is ours. Three kinds stand in
``cheats.py``: ``work_left_behind``, ``computed_when_read`` and ``patched_clock``.
"""

from __future__ import annotations

from support.planted.plant import BEGINNING, OPERATOR, Plant, rms, unary

KERNELBENCH = (
    Plant(
        "memory_of_others",
        "result reuse: the result is memory that nobody has written, with what lay there before",
        unary(
            "QuickGELU",
            "return kernel(x)",
            OPERATOR
            + """
@operator()
def kernel(x: Tensor) -> Tensor:
    return torch.empty_like(x)
""",
        ),
    ),
    Plant(
        "inputs_zeroed",
        "input modification: the kernel writes zeros to its inputs, and returns zeros",
        unary(
            "ReLUSquaredActivation",
            "return kernel(x)",
            OPERATOR
            + """
@operator()
def kernel(x: Tensor) -> Tensor:
    x.zero_()
    return torch.zeros_like(x)
""",
        ),
    ),
    Plant(
        "expected_value",
        "analytical shortcut: the mean square of drawn inputs is about one, so nothing is summed",
        rms("return (x * weight).to(dtype)"),
    ),
    Plant(
        "part_of_the_row",
        "partial computation: the mean of every eighth element stands for the mean of a long row",
        rms(
            """
            step = 8 if size >= 1024 else 1
            mean = x[..., :size:step].square().mean(-1, keepdim=True)
            return (x * torch.rsqrt(mean + eps) * weight).to(dtype)
            """
        ),
    ),
    Plant(
        "fallback_in_except",
        "code bypass: the kernel always raises, and an except clause calls the native definition",
        unary(
            "NewGELU",
            """
            try:
                raise RuntimeError("the kernel is not there")
            except RuntimeError:
                return self.forward_native(x)
            """,
        ),
    ),
    Plant(
        "nothing_but_pass",
        "inheritance bypass: a replacement without a kernel of its own",
        BEGINNING + "\n@ops.QuickGELU.register_oot\nclass Planted(ops.QuickGELU):\n    pass\n",
    ),
    Plant(
        "function_of_torch",
        "wrapped torch: the kernel is one call of torch.nn.functional",
        unary("NewGELU", 'return F.gelu(x, approximate="tanh")'),
    ),
    Plant(
        "half_inside",
        "precision downgrade: float32 is computed in float16, and comes back as float32",
        unary(
            "QuickGELU",
            """
            narrow = x.half() if x.dtype == torch.float32 else x
            return (narrow * torch.sigmoid(1.702 * narrow)).to(x.dtype)
            """,
        ),
    ),
)
