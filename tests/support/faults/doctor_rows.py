"""Rows of plugins with a fault of each kind that the doctor looks for, and what it must find of them."""

from __future__ import annotations

from support.faults.planting import PLUGIN

HEAD = """
import opgraft, os, torch
from opgraft.ops import FastGELU, FatreluAndMul, GELU, GELUTanh, GeluAndMul, MulAndSilu, NewGELU, QuickGELU
from opgraft.ops import ReLU, SiLU, SiluAndMulWithClamp, SwigluOAIAndMul
from opgraft.ops.rotary import RotaryEmbeddingBase
from opgraft.ops import ReLUSquaredActivation, RMSNorm, RowParallelLinear, SiluAndMul, SwigluStepAndMul
platforms = "any"
"""


def kernel(op: str, body: str, options: str = "", mark: str = "pass") -> str:
    """A plugin with a kernel of an op that takes one tensor, or of the norm that takes two."""
    arguments = "self, x, residual=None" if op == "RMSNorm" else "self, x"
    return (
        f"{HEAD}class Acme({op}):\n    {mark}\n    def forward_oot({arguments}):\n        {body}\n"
        f"{op}.register_oot(Acme{options})\n"
    )


NATIVE = "return RMSNorm.forward_native(self, x, residual)"

FINDINGS: dict[str, tuple[str, str, int]] = {
    "an import of what is not there": (
        "import libacme_of_the_system\n",
        "ModuleNotFoundError: No module named",
        4,
    ),
    "an error of syntax": ("def (\n", "SyntaxError", 4),
    "an error when it is imported": ("raise OSError('no driver')\n", "OSError: no driver", 4),
    "an exit when it is imported": ("raise SystemExit(0)\n", "SystemExit: 0", 4),
    "an error in a hook": (
        PLUGIN.replace("pass", "1 / 0"),
        "in its hook opgraft_veto: ZeroDivisionError",
        4,
    ),
    "a veto": (
        PLUGIN.replace("pass", "return 'old driver'"),
        "is not used, as it vetoed itself: old driver",
        1,
    ),
    "a change of the process": (
        f"{PLUGIN}opgraft.Platform.prepare = None\n",
        "changed opgraft's Platform.prepare",
        1,
    ),
    "a change of torch": (
        f"{PLUGIN}import torch\ntorch.nn.functional.silu = torch.relu\n",
        "functional.silu while",
        1,
    ),
    "a hook without a mark": (
        PLUGIN + "def opgraft_config(): pass\n",
        "opgraft_config is never called",
        1,
    ),
    "no hook": ("platforms = 'any'\n", "implements no hook and registers no op", 4),
    "a target that nobody registers": (
        kernel("RMSNorm", NATIVE).replace(
            "RMSNorm.register_oot(Acme)", "opgraft.CustomOp.register_oot('RmsNrm')(Acme)"
        ),
        "replaces 'RmsNrm', which no registered op answers to",
        1,
    ),
    "a replacement that is never chosen": (
        kernel("RMSNorm", NATIVE, ", priority=-1"),
        "is never used: ",
        1,
    ),
    "a condition that does not hold": (
        kernel("RMSNorm", NATIVE, ", priority=9, when=lambda platform: False"),
        "is never used: its when= condition is false here",
        1,
    ),
    "a need that is not met": (
        kernel("SiluAndMul", "return x", mark="@opgraft.needs(lambda: 'needs a driver')"),
        "Acme has no kernel that can run here, so SiluAndMul.forward_native does: Acme.forward_oot: needs a driver",
        1,
    ),
    "a kernel that is hidden": (
        kernel(
            "GELU",
            "return x",
            mark="def forward(self, input): return GELU.forward_native(self, input)",
        ).replace("forward_oot(self, x)", "forward_oot(self, input)"),
        "Acme.forward_oot can never run: Acme.forward of that op hides it",
        1,
    ),
    "a check of needs that raises": (
        kernel("ReLUSquaredActivation", "return x", mark="@opgraft.needs(lambda: 1 / 0)"),
        "its needs() check raised ZeroDivisionError",
        1,
    ),
    "a switch that raises": (
        kernel("QuickGELU", "return x", mark="enabled = classmethod(lambda cls: 1 / 0)"),
        "Acme is disabled: its enabled() raised ZeroDivisionError",
        1,
    ),
    "a condition that raises": (
        kernel("RMSNorm", NATIVE, ", priority=9, when=lambda platform: 1 / 0"),
        "is never used: its when= condition raised ZeroDivisionError",
        1,
    ),
    "a constructor that raises": (
        kernel("FatreluAndMul", "return x", mark="__init__ = lambda self, *_, **__: 1 / 0"),
        "raised ZeroDivisionError",
        1,
    ),
    "a result of another dtype": (
        kernel("NewGELU", "return NewGELU.forward_native(self, x).float()"),
        "returns float32 [7, 9], expected bfloat16 [7, 9], for bfloat16 inputs of gelu_new",
        1,
    ),
    "a result of another shape": (
        kernel("FastGELU", "return FastGELU.forward_native(self, x)[..., :1]"),
        "returns float32 [7, 1], expected float32 [7, 9], for float32 inputs of gelu_fast",
        1,
    ),
    "results of another number": (
        kernel("MulAndSilu", "return MulAndSilu.forward_native(self, x), x"),
        "returns 2 tensors, expected 1, for float32 inputs of mul_and_silu",
        1,
    ),
    "a result that is not contiguous": (
        kernel(
            "SwigluStepAndMul", "return SwigluStepAndMul.forward_native(self, x).T.contiguous().T"
        ),
        "returns a tensor that is not contiguous, with strides [1, 7], expected [9, 1],",
        1,
    ),
    "a result on another device": (
        kernel("SwigluOAIAndMul", "return SwigluOAIAndMul.forward_native(self, x).to('meta')"),
        "returns a tensor on meta, expected cpu, for float32 inputs of",
        1,
    ),
    "a platform that nobody offers": (
        "platforms = ['nvidia']\nimport opgraft\n@opgraft.hookimpl\ndef opgraft_veto(): pass\n",
        "states the platforms 'nvidia' only, which nothing installed offers, so it never runs here",
        1,
    ),
    "a method of no dispatch key": (
        kernel("GELUTanh", "return x", mark="def forward_npu(self, x): return x").replace(
            "return x\nGELU", "return GELUTanh.forward_native(self, x)\nGELU"
        ),
        "Acme.forward_npu is never called: 'npu' is no dispatch key. Call the method forward_oot",
        1,
    ),
    "a kernel that is waited for": (
        kernel("ReLU", "return x").replace("    def forward_oot", "    async def forward_oot"),
        "is an async function, and nobody awaits its result: write a plain def",
        4,
    ),
    "a kernel in pieces": (
        kernel("ReLU", "yield x"),
        "yields, and a call would give a generator in place of tensors: return the results",
        4,
    ),
    "a method of no dispatch key alone": (
        kernel("ReLU", "return x").replace("forward_oot", "forward_npu"),
        "It defines forward_npu: no dispatch key has that name, and a kernel for a device of your own is called "
        "'forward_oot'.",
        4,
    ),
    "a base that no model constructs": (
        kernel("RotaryEmbeddingBase", "raise OSError").replace("(self, x)", "(self, *args, **kw)"),
        "Acme replaces RotaryEmbeddingBase, which no model constructs, so it never runs: replace RotaryEmbedding or",
        1,
    ),
    "a constructor without its base's": (
        kernel("SiluAndMulWithClamp", "return x").replace(
            "    pass\n", "    def __init__(self, *args, **kwargs): self.size = 8\n"
        ),
        "Acme.__init__ at",
        1,
    ),
    "a constructor of a layer without its base's": (
        kernel("RowParallelLinear", "return x").replace(
            "    pass\n", "    def __init__(self, *args, **kwargs): torch.nn.Linear(1, 1)\n"
        ),
        "does not call super().__init__(), so the Acme has neither parameters nor children",
        1,
    ),
    "a decorator without a class": (
        f"{PLUGIN}from opgraft.ops import SiLU\nSiLU.register_oot(priority=2)\n",
        "is applied to no class, so it registers nothing: write it as a decorator above the class",
        1,
    ),
    "a decorator of a layer without a class, and nothing else": (
        f"{HEAD}RowParallelLinear.register_oot('text')\n",
        "registers no op: register_oot at",
        4,
    ),
    "a kernel that changes the process": (
        kernel(
            "SiLU", "torch.set_default_dtype(torch.float64); return SiLU.forward_native(self, x)"
        ),
        "Acme.forward_oot changed the default dtype from torch.float32 to torch.float64 when it was",
        1,
    ),
    "a kernel that raises": (
        kernel("GeluAndMul", "raise OSError('no device')"),
        "raised OSError: no device",
        1,
    ),
}
"""By name: the source of a plugin, words of what is found, and the exit code of that finding alone."""

PLACELESS = ("no hook",)
"""Those of ``FINDINGS`` for which no line is to blame."""

ENDS: dict[str, tuple[str, str]] = {
    "a segmentation fault": (
        "import os\nos.kill(os.getpid(), 11)\n",
        "crashed the process with signal SIGSEGV",
    ),
    "an abort": ("import os\nos.abort()\n", "crashed the process with signal SIGABRT"),
    "an illegal instruction": (
        "import os\nos.kill(os.getpid(), 4)\n",
        "crashed the process with signal SIGILL",
    ),
    "an end by status 0": ("import os\nos._exit(0)\n", "ended the process with status 0"),
    "an end by status 1": ("import os\nos._exit(1)\n", "ended the process with status 1"),
    "a hang": ("import time\ntime.sleep(3600)\n", "did not come back within 20 s"),
    "too much memory": (
        "taken = b'x' * (3 << 30)\nimport time\ntime.sleep(3600)\n",
        "of memory, more than the 2.5 GiB",
    ),
    "an abort some time later": (
        f"{PLUGIN}import os, threading\nthreading.Timer(1.0, os.abort).start()\n",
        "some time after it was loaded alone, crashed the process with signal SIGABRT",
    ),
    "a slow import": (
        f"{PLUGIN}import time\ntime.sleep(5)\n",
        "s to import, and each process that constructs an op",
    ),
}
"""By name: the source of a plugin that takes its process down or holds it up, and words of what is found."""

WITH_A_PLACE = (
    "a segmentation fault",
    "an abort",
    "an illegal instruction",
    "a hang",
    "a slow import",
)
"""Those of ``ENDS`` of which Python's stack, or its module, tells the file."""

POINTS = {
    "a module that is not there": ("opgraft.plugins", "acme_of_nobody", "ModuleNotFoundError"),
    "an object that is not there": (
        "opgraft.plugins",
        "acme_points:plugin",
        "has no attribute 'plugin'",
    ),
    "a platform's object that is not there": (
        "opgraft.platforms",
        "acme_points:SPEC",
        "names 'SPEC', which acme_poi",
    ),
    "a group of another name": ("opgraft.plugin", "acme_points", "did you mean 'opgraft.plugins'"),
}
"""By name: the group and the value of an entry point that does not resolve, and words of what is found."""
