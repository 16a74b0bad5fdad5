"""A planted kernel as a record, and the plugins around kernels in Python, C++ and Triton.

The templates hold what every plugin of a kind needs: the class, the cast to a dtype that the kernel
takes, and the operator that a compiler does not look into. A plant fills in the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent


@dataclass(frozen=True)
class Plant:
    """A plugin with one kernel.

    Attributes:
        name: of the plugin.
        fault: the real fault that a wrong kernel stands for, or why a correct one looks suspicious.
        source: the module of the plugin.
        library: C++ that is compiled to a library beside the module; empty without one.
    """

    name: str
    fault: str
    source: str
    library: str = ""

    @property
    def language(self) -> str:
        """The language of the kernel."""
        if self.library:
            return "C++"
        return "Triton" if "@triton.jit" in self.source else "Python"


BEGINNING = """
import math, sys, threading, time
import torch
from torch import Tensor
from torch.nn import functional as F
import opgraft
from opgraft import ops
platforms = "any"

def wide(x):
    return x if x.dtype == torch.float64 else x.float()
"""

OPERATOR = """
def like(x, *numbers):
    return x.new_empty(x.shape)

def operator(fake=like):
    def decorate(function):
        name = f"{__name__}::{function.__name__}"
        made = torch.library.custom_op(name, function, mutates_args=())
        made.register_fake(fake)
        return made
    return decorate

def half(x, *numbers):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
"""
"""An operator that a compiler does not look into."""

LIBRARY = """
import ctypes
from pathlib import Path
LIBRARY = ctypes.CDLL(str(Path(__file__).with_suffix(".kernel")))

def call(*given):
    words = []
    for each in given:
        if isinstance(each, Tensor):
            words.append(ctypes.c_void_p(each.data_ptr()))
        else:
            words.append(ctypes.c_float(each) if isinstance(each, float) else ctypes.c_longlong(each))
    LIBRARY.kernel(*words)
"""

TRITON = """
from threading import Lock
import triton
import triton.language as tl

# Triton's interpreter changes its language while a kernel runs, for all threads.
ONE = Lock()
"""

CPP = """
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
using std::int64_t;
#define EXPORT extern "C" __attribute__((visibility("default")))
"""


def method(op: str, signature: str, body: str, before: str = "") -> str:
    """Return a plugin that replaces an op by a method with these lines."""
    return (
        BEGINNING
        + dedent(before)
        + f"\n@ops.{op}.register_oot\nclass Planted(ops.{op}):\n"
        + f"    @opgraft.inference_only\n    def forward_oot(self, {signature}):\n"
        + indent(dedent(body).strip("\n"), "        ")
        + "\n"
    )


def unary(op: str, body: str, before: str = "") -> str:
    """Return a plugin for an activation; the lines take ``x`` and return the result."""
    return method(op, "x", body, before)


RMS_METHOD = """
summed = wide(x) if residual is None else wide(x) + wide(residual)
size = self.variance_size_override or x.shape[-1]
out = normed(summed, self.weight, self.variance_epsilon, size, x.dtype)
return out if residual is None else (out, summed.to(x.dtype))
"""
GEMMA_METHOD = """
summed = wide(x) if residual is None else wide(x) + wide(residual)
out = normed(summed, self.weight, self.variance_epsilon, x.shape[-1], x.dtype)
return out if residual is None else (out, summed.to(x.dtype))
"""
NORMED = "def normed(x, weight, eps, size, dtype):\n"


def rms(body: str, before: str = "", op: str = "RMSNorm") -> str:
    """Return a plugin for an RMS norm.

    The lines take the summed ``x`` in a wide dtype, ``weight``, ``eps``, the ``size`` of the part
    that counts and the ``dtype`` of the result.
    """
    function = NORMED + indent(dedent(body).strip("\n"), "    ")
    around = GEMMA_METHOD if op == "GemmaRMSNorm" else RMS_METHOD
    return method(op, "x, residual=None", around, f"{dedent(before)}\n{function}")


def layer_norm(body: str, before: str = "") -> str:
    """Return a plugin for a layer norm; the lines take a wide ``x`` and the module's numbers."""
    function = "def normed(x, weight, bias, eps, shape):\n" + indent(
        dedent(body).strip("\n"), "    "
    )
    around = """
    weight = None if self.weight is None else wide(self.weight)
    bias = None if self.bias is None else wide(self.bias)
    out = normed(wide(input), weight, bias, self.eps, self.normalized_shape)
    return out.to(input.dtype)
    """
    return method("LayerNorm", "input", around, f"{dedent(before)}\n{function}")


PACKED = "x = x.contiguous()"


def cpp_unary(op: str, *, parts: int = 1, prepare: str = PACKED, number: str = "") -> str:
    """Return a plugin for an activation whose kernel is in C++.

    Args:
        op: the op class.
        parts: 2 for a gated activation, which halves a row.
        prepare: a statement that makes ``x`` fit the kernel.
        number: the attribute of the module that the kernel takes besides.
    """
    before = (
        f"{OPERATOR}{LIBRARY}\n@operator({'half' if parts == 2 else 'like'})\n"
        f"def kernel(x: Tensor{', number: float' if number else ''}) -> Tensor:\n"
        f"    {prepare}\n"
        f"    width = x.shape[-1] // {parts}\n"
        "    out = torch.empty((*x.shape[:-1], width))\n"
        f"    call(x, out, out.numel() // max(width, 1), width{', number' if number else ''})\n"
        "    return out\n"
    )
    body = f"""
    if x.dtype == torch.float64:
        return self.forward_native(x)
    return kernel(x.float(){f", self.{number}" if number else ""}).to(x.dtype)
    """
    return unary(op, body, before)


ROWS = """
@operator(lambda x, weight, eps, size: torch.empty_like(x))
def kernel(x: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    {launch}
    return out
"""
CALL_ROWS = "call(x, weight.contiguous(), out, x.numel() // max(width, 1), width, eps, size)"
OWN_ROWS = """
if x.dtype == torch.float64:
    normal = x * torch.rsqrt(x[..., :size].square().mean(-1, keepdim=True) + eps)
    return (normal * {factor}).to(dtype)
return kernel(x, {weight}, eps, size).to(dtype)
"""


def cpp_rms(op: str = "RMSNorm", launch: str = CALL_ROWS) -> str:
    """Return a plugin for an RMS norm over float32 rows in C++."""
    gemma = op == "GemmaRMSNorm"
    body = OWN_ROWS.format(
        factor="(1 + weight)" if gemma else "weight",
        weight="1 + weight.float()" if gemma else "weight.float()",
    )
    return rms(body, OPERATOR + LIBRARY + ROWS.format(launch=launch), op)


def triton_unary(op: str, jitted: str, *, parts: int = 1, launch: str) -> str:
    """Return a plugin for an activation in Triton; ``launch`` is the statement that launches it."""
    before = OPERATOR + TRITON + dedent(jitted)
    before += (
        f"\n@operator({'half' if parts == 2 else 'like'})\n"
        "def kernel(x: Tensor) -> Tensor:\n"
        "    x = x.contiguous()\n"
        f"    width = x.shape[-1] // {parts}\n"
        "    out = x.new_empty((*x.shape[:-1], width))\n"
        "    count = out.numel()\n"
        "    rows = count // max(width, 1)\n"
        f"    with ONE:\n        if count:\n{indent(dedent(launch).strip(), ' ' * 12)}\n"
        "    return out\n"
    )
    # Triton's interpreter cuts bfloat16 off, where a GPU rounds.
    body = """
    if x.dtype == torch.float64:
        return self.forward_native(x)
    return kernel(x.float()).to(x.dtype) if x.dtype == torch.bfloat16 else kernel(x)
    """
    return unary(op, body, before)


def triton_rms(jitted: str, launch: str, op: str = "RMSNorm") -> str:
    """Return a plugin for an RMS norm in Triton."""
    gemma = op == "GemmaRMSNorm"
    inner = indent(dedent(launch).strip(), " " * 12)
    launch = (
        "rows, weight = x.numel() // max(width, 1), weight.contiguous()\n"
        f"    with ONE:\n        if x.numel():\n{inner}"
    )
    body = OWN_ROWS.format(
        factor="(1 + weight)" if gemma else "weight",
        weight="1 + weight.float()" if gemma else "weight.float()",
    )
    before = OPERATOR + TRITON + dedent(jitted) + ROWS.format(launch=launch)
    return rms(body, before, op)


ROTARY_BEGINNING = """
def rotate(x, cos, sin, neox):
    if neox:
        first, second = x.chunk(2, -1)
    else:
        first, second = x[..., ::2], x[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
"""
ROTARY_METHOD = """
rows = wide(self.cos_sin_cache)[positions]
out = []
for x in (query, key):
    if x is None:
        out.append(None)
        continue
    tokens = positions.shape
    number = math.prod(x.shape[len(tokens):]) // self.head_size
    heads = x.reshape(*tokens, number, self.head_size)
    out.append(turned(wide(heads), rows.unsqueeze(-2), self.is_neox_style).to(x.dtype).reshape(x.shape))
return tuple(out)
"""


def rotary(body: str, before: str = "") -> str:
    """Return a plugin for a rotary embedding.

    The lines take whole heads ``x``, ``rows`` of cosines and sines, and ``neox``, and return the
    turned heads.
    """
    function = "def turned(x, rows, neox):\n" + indent(dedent(body).strip("\n"), "    ")
    before = f"{ROTARY_BEGINNING}\n{dedent(before)}\n{function}"
    return method("RotaryEmbedding", "positions, query, key=None", ROTARY_METHOD, before)


ATTENTION_METHOD = """
if dropout_p:
    return self.forward_native(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
mask = attn_mask
if is_causal:
    later = torch.ones(query.shape[-2], key.shape[-2], device=query.device, dtype=torch.bool).triu(1)
    mask = torch.zeros(later.shape, device=query.device).masked_fill(later, -math.inf)
elif mask is not None and mask.dtype == torch.bool:
    mask = torch.zeros(mask.shape, device=query.device).masked_fill(~mask, -math.inf)
factor = query.shape[-1] ** -0.5 if scale is None else scale
q, k, v = wide(query), wide(key), wide(value)
out = attend(q, k, v, None if mask is None else mask.to(q.dtype), factor)
return out.to(query.dtype)
"""


def attention(body: str, before: str = "", around: str = ATTENTION_METHOD) -> str:
    """Return a plugin for attention; the lines take wide heads, a mask to add, and the scale."""
    signature = (
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, "
        "scale=None, enable_gqa=False"
    )
    function = "def attend(q, k, v, mask, scale):\n" + indent(dedent(body).strip("\n"), "    ")
    return method("ScaledDotProductAttention", signature, around, f"{dedent(before)}\n{function}")
