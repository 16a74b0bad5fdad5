"""Plugins with a defect each, and the op and the check by which the conformance kit must find it."""

from __future__ import annotations

from dataclasses import dataclass

BEGINNING = """
import math, threading
import torch
from torch.nn.functional import gelu, silu
import opgraft
from opgraft.ops import (
    GELU, ApplyRotaryEmb, GatedMLP, GemmaRMSNorm, LayerNorm, Mixer2RMSNormGated, RMSNorm, SiluAndMul,
)
platforms = "any"

def normed(x, eps, weight=None):
    wide = x.float() if x.itemsize < 4 else x
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)
"""


@dataclass(frozen=True)
class Defect:
    """The code of a plugin; what must fail, as op, check and dtype; and a part of the reason."""

    found: str
    reason: str
    source: str


GEMMA = """
@GemmaRMSNorm.register_oot
class Acme(GemmaRMSNorm):
    def forward_oot(self, x, residual=None):
        if residual is None:
            return normed(x, self.variance_epsilon, 1 + self.weight)
        return normed(x + residual, self.variance_epsilon, self.weight), x + residual
"""

RMS = """
@RMSNorm.register_oot
class Acme(RMSNorm):
    def forward_oot(self, x, residual=None):
        x = x if residual is None else x + residual
        part = x[..., : self.variance_size_override] if {part} else x
        wide = x.float() if {wide} else x
        variance = part.to(wide.dtype).square().mean(-1, keepdim=True)
        out = wide * torch.rsqrt(variance + {eps})
        out = (out * self.weight if self.has_weight else out){cast}
        return out if residual is None {single}else (out, x)
"""
RIGHT = {
    "part": "True",
    "wide": "x.itemsize < 4",
    "eps": "self.variance_epsilon",
    "cast": ".to(x.dtype)",
    "single": "",
}


def rms(**wrong: str) -> str:
    """An RMS norm that is right but for what is given."""
    return RMS.format(**{**RIGHT, **wrong})


def of_gelu(body: str, more: str = "") -> str:
    """A GELU with these lines in its kernel, of which the last gives ``out``."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"""
{more}
@GELU.register_oot
class Acme(GELU):
    def forward_oot(self, input):
{lines}
        return out
"""


SILU_AND_MUL = """
@SiluAndMul.register_oot
class Acme(SiluAndMul):
    def forward_oot(self, x):
        gate, up = x.chunk(2, -1)
        return {result}
"""

OFF_IN_A_CORNER = SILU_AND_MUL.format(result="silu(gate) * up * (1.01 if {corner} else 1.0)")

UNFINISHED = """
@GELU.register_oot
class Acme(GELU):
    def __init__(self, *args, **kwargs):
        self.approximate = "none"

    def forward_oot(self, input):
        return gelu(input)
"""

EXACT = "out = gelu(input, approximate=self.approximate)"

DEFECTS = {
    "Gemma's norm without the +1 in the residual path": Defect(
        "fused_add_gemma_rms_norm-values-float32", "Tensor-likes are not close", GEMMA
    ),
    "ignored variance_size_override": Defect(
        "rms_norm-values-float32", "variant 'part of a row'", rms(part="False")
    ),
    "wrong epsilon": Defect("rms_norm-values-float32", "variant 'eps'", rms(eps="1e-6")),
    "an interrupt of its own": Defect(
        "gelu-values-float32", "KeyboardInterrupt", of_gelu("raise KeyboardInterrupt")
    ),
    "a constructor that does not call that of the base": Defect(
        "gelu-values-float32", "does not call super().__init__()", UNFINISHED
    ),
    "overflow in float16": Defect("rms_norm-range", "not close", rms(wide="False")),
    "wrong dtype of the result": Defect(
        "rms_norm-values-bfloat16", "returned torch.float32 for torch.bfloat16", rms(cast="")
    ),
    "a result too few": Defect(
        "fused_add_rms_norm-values-float32", "made 1 tensors, expected 2", rms(single="or 1 ")
    ),
    "swapped halves": Defect(
        "silu_and_mul-values-float32", "not close", SILU_AND_MUL.format(result="gate * silu(up)")
    ),
    "in place on an input": Defect(
        "silu_and_mul-effects",
        "wrote to ['x'], declared are []",
        SILU_AND_MUL.format(result="silu(gate).mul(up.mul_(1.5)) / 1.5"),
    ),
    "a view of three dimensions, read as if it were packed": Defect(
        "gelu-inputs-float32",
        "numbers are off",
        of_gelu(
            "if input.dim() == 3 and not input.is_contiguous() and 0 not in input.stride():\n"
            "    input = input.as_strided(input.shape, torch.empty(input.shape).stride())\n" + EXACT
        ),
    ),
    "half a tile that is lost in wide rows": Defect(
        "silu_and_mul-inputs-float32",
        "numbers are off",
        OFF_IN_A_CORNER.format(corner="up.shape[-1] > 1024 and up.shape[-1] % 128 == 64"),
    ),
    "a rest of sixteen in wide rows": Defect(
        "silu_and_mul-inputs-float32",
        "numbers are off",
        OFF_IN_A_CORNER.format(corner="up.shape[-1] > 1024 and up.shape[-1] % 32 == 16"),
    ),
    "a batch of parts of a fused buffer": Defect(
        "silu_and_mul-inputs-float32",
        "numbers are off",
        OFF_IN_A_CORNER.format(corner="x.dim() == 3 and x.stride(-2) > 2 * x.shape[-1]"),
    ),
    "a weight that is rounded first": Defect(
        "gemma_rms_norm-inputs-bfloat16",
        "it rounds once more",
        GEMMA.replace("1 + self.weight)", "(1 + self.weight).to(x.dtype))"),
    ),
    "a result that is kept by address": Defect(
        "gelu-calls",
        "other values in the same memory",
        of_gelu(
            "key = input.data_ptr(), input.shape\n"
            "if key not in KEPT:\n"
            "    KEPT[key] = input, gelu(input, approximate=self.approximate)\n"
            "out = KEPT[key][1].clone()",
            "KEPT = {}",
        ),
    ),
    "the reference of a proof": Defect(
        "gelu-honesty",
        "gelu runs the reference of a proof",
        of_gelu(
            "out = SPECS['gelu'].reference(input.double(), self.approximate).to(input.dtype)",
            "from opgraft.testing.catalogue import SPECS",
        ),
    ),
    "half the precision, unless the kit is on the stack": Defect(
        "gelu-honesty",
        "in a bare thread has other values",
        of_gelu(
            "frame = sys._getframe()\n"
            "while frame and not frame.f_globals['__name__'].startswith('opgraft.testing'):\n"
            "    frame = frame.f_back\n"
            "input = input if frame else input.bfloat16().to(input.dtype)\n" + EXACT,
            "import sys",
        ),
    ),
    "a gradient that is another one": Defect(
        "silu_and_mul-gradients",
        "Jacobian mismatch",
        SILU_AND_MUL.format(result="silu(gate).detach() * up"),
    ),
    "interleaved rope for neox": Defect(
        "apply_rotary_emb-values-float32",
        "not close",
        """
@ApplyRotaryEmb.register_oot
class Acme(ApplyRotaryEmb):
    def forward_oot(self, x, cos, sin):
        cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
""",
    ),
    "an argument that is left out": Defect(
        "layer_norm-values-float32",
        "not close",
        """
@LayerNorm.register_oot
class Acme(LayerNorm):
    def forward_oot(self, input):
        return torch.nn.functional.layer_norm(input, self.normalized_shape, self.weight, None, self.eps)
""",
    ),
    "an approximation that is not asked for": Defect(
        "gelu-values-float32", "not close", of_gelu('out = gelu(input, approximate="tanh")')
    ),
    "a stale output buffer": Defect(
        "gelu-repetition",
        "what the first call of gelu returned",
        of_gelu(
            "if getattr(self, 'buffer', None) is None or self.buffer.shape != input.shape:\n"
            "    self.buffer = torch.empty_like(input)\n"
            f"{EXACT}\n"
            "out = self.buffer.copy_(out)"
        ),
    ),
    "another result each time": Defect(
        "gelu-repetition",
        "a second call of gelu",
        of_gelu(f"{EXACT}\nout = out + 1e-6 * torch.rand_like(out)"),
    ),
    "a buffer that threads share": Defect(
        "gelu-reentrancy",
        "beside those of other threads",
        of_gelu(
            "SHARED.append(input)\n"
            "time.sleep(2e-3)\n"
            "last = SHARED[-1]\n"
            "out = gelu(input, approximate=self.approximate)\n"
            "out = out if last is input else out + 1",
            "import time\nSHARED = []\n",
        ),
    ),
    "an ignored stride": Defect(
        "gelu-strides",
        "not close",
        of_gelu(
            "strides = torch.empty(input.shape, device='meta').stride()\n"
            "input = input.as_strided(input.shape, strides)\n"
            f"{EXACT}"
        ),
    ),
    "a wrong shape of nothing": Defect(
        "gelu-values-float32",
        "of inputs (0,)",
        of_gelu(f"{EXACT}\nout = out if input.numel() else input.new_empty(0)"),
    ),
    "a gradient that is detached": Defect(
        "gelu-gradients",
        "Acme.forward_oot loses gradients",
        of_gelu("input = input.detach()\n" + EXACT),
    ),
    "a missing fake rule": Defect(
        "gelu-compilation",
        "acme_planted",
        of_gelu(
            "out = torch.ops.acme_planted.no_fake(input, self.approximate)",
            "@torch.library.custom_op('acme_planted::no_fake', mutates_args=())\n"
            "def no_fake(x: torch.Tensor, approximate: str) -> torch.Tensor:\n"
            "    return gelu(x, approximate=approximate)\n",
        ),
    ),
    "an operator whose fake rule is wrong": Defect(
        "gelu-operators",
        "acme_planted",
        of_gelu(
            "out = torch.ops.acme_planted.wrong_fake(input, self.approximate)",
            "@torch.library.custom_op('acme_planted::wrong_fake', mutates_args=())\n"
            "def wrong_fake(x: torch.Tensor, approximate: str) -> torch.Tensor:\n"
            "    return gelu(x, approximate=approximate)\n"
            "wrong_fake.register_fake(lambda x, approximate: x.new_empty(1))\n",
        ),
    ),
    "an operator that writes to a copy, which its schema does not tell": Defect(
        "gelu-operators",
        "not defined as mutable but was mutated",
        of_gelu(
            "out = torch.ops.acme_planted.untold_write(input.clone(), self.approximate)",
            "@torch.library.custom_op('acme_planted::untold_write', mutates_args=())\n"
            "def untold_write(x: torch.Tensor, approximate: str) -> torch.Tensor:\n"
            "    out = gelu(x, approximate=approximate)\n"
            "    x.zero_()\n"
            "    return out\n"
            "untold_write.register_fake(lambda x, approximate: torch.empty_like(x))\n",
        ),
    ),
    "a graph break": Defect(
        "gelu-compilation",
        "item",
        of_gelu(f"{EXACT}\nif input.abs().max().item() > 1e9:\n    out = out.clone()"),
    ),
    "a recompilation for each size": Defect(
        "gelu-compilation",
        "was compiled 3 times for 3 sizes",
        of_gelu(f"{EXACT}\nout = out * SCALES.setdefault(int(input.shape[0]), 1.0)", "SCALES = {}"),
    ),
    "state under other names": Defect(
        "rms_norm-state",
        "gamma: (9,) float32, expected none",
        """
@RMSNorm.register_oot
class Acme(RMSNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gamma = torch.nn.Parameter(torch.ones(args[0]))
    def forward_oot(self, x, residual=None):
        return self.forward_native(x, residual)
""",
    ),
    "a weight that is loaded otherwise": Defect(
        "mixer2_gated_rms_norm-state",
        "weight, loaded by its weight_loader, has other values",
        """
@Mixer2RMSNormGated.register_oot
class Acme(Mixer2RMSNormGated):
    def weight_loader(self, param, loaded_weight):
        param.data.copy_(loaded_weight[...] + 1)
    def forward_oot(self, x, gate):
        return self.forward_native(x, gate)
""",
    ),
    "a copy that is no copy": Defect(
        "rms_norm-copies",
        "a deep copy has the very parameters",
        """
@RMSNorm.register_oot
class Acme(RMSNorm):
    def __deepcopy__(self, memo):
        return self
    def forward_oot(self, x, residual=None):
        return self.forward_native(x, residual)
""",
    ),
    "state that cannot be pickled": Defect(
        "gelu-copies",
        "cannot pickle",
        """
@GELU.register_oot
class Acme(GELU):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()
    def forward_oot(self, input):
        return gelu(input, approximate=self.approximate)
""",
    ),
    "a native definition that is another one": Defect(
        "gelu-switching",
        "not close",
        of_gelu(EXACT) + "    def forward_native(self, input):\n        return gelu(input)\n",
    ),
    "a misspelt target": Defect(
        "(plugin)-registration",
        "replaces 'RmsNrm', which no registered op answers to",
        of_gelu(EXACT).replace("GELU.register_oot", 'GELU.register_oot(name="RmsNrm")'),
    ),
    "forward_oot that a layer's forward hides": Defect(
        "gated_mlp-reachable",
        "Acme.forward_oot",
        """
@GatedMLP.register_oot
class Acme(GatedMLP):
    def forward(self, x):
        return super().forward(x)
    def forward_oot(self, x):
        return super().forward(x)
""",
    ),
    "a kernel that can never run": Defect(
        "gelu-reachable",
        "needs a driver",
        of_gelu(EXACT).replace("    def", "    @opgraft.needs(lambda: 'needs a driver')\n    def"),
    ),
}

PLATFORM = """
import torch
from opgraft import DeviceMemory
from opgraft.platforms.cpu.platform import CpuPlatform
class Device(CpuPlatform):
    name = "acme"
    dispatch_chain = ("native",)
"""

OF_PLATFORMS = {
    "more memory free than there is": Defect(
        "(platform)-memory",
        "2 bytes free of 1",
        "    def memory(self, index=0):\n        return DeviceMemory(total=1, free=2)\n",
    ),
    "a seed that is dropped": Defect(
        "(platform)-seeding",
        "other random numbers the second time",
        "    def manual_seed(self, seed):\n        pass\n",
    ),
    "no device": Defect(
        "(platform)-devices", "returned 0", "    def device_count(self):\n        return 0\n"
    ),
}

SIMULATED = """
from types import SimpleNamespace
from opgraft.testing import simulated_streams as right
from opgraft.testing.simulated_platform import SimulatedPlatform
class Device(SimulatedPlatform):
    name = {name!r}
    streams = SimpleNamespace(**vars(right))
"""

OF_STREAMS = {
    "streams in order": (SIMULATED, ""),
    "a stream that is not waited for": (
        SIMULATED
        + "class Stream(right.Stream):\n    def wait_stream(self, stream):\n        pass\n"
        "Device.streams.Stream = Stream\n",
        "after wait_stream() of the reader",
    ),
    "an event that says nothing of its stream": (
        SIMULATED + "class Event(right.Event):\n    def record(self, stream=None):\n        pass\n"
        "Device.streams.Event = Event\n",
        "after synchronize() of an event",
    ),
    "a platform that forgets its streams": (
        SIMULATED + "Device.synchronize = lambda self, index=0: None\n",
        "after synchronize() of the platform",
    ),
    "a stream that is never done": (
        SIMULATED + "class Stream(right.Stream):\n    def query(self):\n        return False\n"
        "Device.streams.Stream = Stream\n",
        "query() of the stream says that its work is not done",
    ),
    "a scope that is not left": (
        SIMULATED + "from contextlib import contextmanager\n@contextmanager\ndef stream(s):\n"
        "    right._current.stream = s\n    yield\nDevice.streams.stream = stream\n",
        "stream(s) leaves another current stream behind",
    ),
}
"""By name, a platform with streams, and what the kit must say of them."""
