"""Sixty correct kernels that look suspicious: they compute the same in another way."""

from __future__ import annotations

from support.planted.corners import FLAT, QUICK, RIGHT_RMS, RMS_TILE
from support.planted.plant import (
    CPP,
    OPERATOR,
    Plant,
    attention,
    cpp_rms,
    cpp_unary,
    layer_norm,
    method,
    rms,
    rotary,
    triton_rms,
    triton_unary,
    unary,
)
from support.planted.subtle import (
    BOUNDED,
    ENCODER,
    ENCODER_CALL,
    FLOORED,
    FP8,
    FP8_CALL,
    GATE,
    GATED,
    REPEATED,
    ROUTING,
    SOFTMAX,
)

ROUNDED = """
if weight.itemsize < 4:
    normal = normal.to(weight.dtype)
return (normal * weight).to(dtype)
"""
AFFINE = """
out = out if weight is None else out * weight
return out if bias is None else out + bias
"""
DIMS = """
dims = tuple(range(x.dim() - len(shape), x.dim()))
"""
FLAT_LAUNCH = "jitted[(triton.cdiv(count, 16384),)](x, out, count, BLOCK=16384)"
PART = """
cos, sin = rows.chunk(2, -1)
size = rows.shape[-1]
head, passed = x[..., :size], x[..., size:]
"""


def activation(name: str, why: str, op: str, body: str, before: str = "") -> Plant:
    return Plant(name, why, unary(op, body, before))


ACTIVATIONS = (
    activation(
        "by_tanh",
        "the sigmoid by tanh",
        "QuickGELU",
        """
y = wide(x)
return (y * 0.5 * (1 + torch.tanh(0.851 * y))).to(x.dtype)
""",
    ),
    activation(
        "by_exp2",
        "the sigmoid by a power of two",
        "QuickGELU",
        """
y = wide(x)
return (y / (1 + torch.exp2(y * (-1.702 / math.log(2))))).to(x.dtype)
""",
    ),
    activation(
        "by_sigmoid",
        "the tanh by a sigmoid",
        "NewGELU",
        """
y = wide(x)
return (y * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (y + 0.044715 * y ** 3))).to(x.dtype)
""",
    ),
    activation(
        "by_horner",
        "the polynomial in another order",
        "FastGELU",
        """
y = wide(x)
return (0.5 * y * (1 + torch.tanh(y * (0.7978845608028654 + 0.035677408136300125 * y * y)))).to(x.dtype)
""",
    ),
    activation(
        "by_where",
        "a choice instead of a maximum",
        "ReLUSquaredActivation",
        "return torch.where(x > 0, x * x, torch.where(x.isnan(), x, torch.zeros_like(x)))",
    ),
    activation(
        "in_its_own_buffer",
        "works in place, on a copy of its own",
        "ReLUSquaredActivation",
        """
y = x.clone(memory_format=torch.contiguous_format)
y.relu_()
return y.mul_(y)
""",
    ),
    activation(
        "all_in_double",
        "float64 inside for every dtype",
        "GELUTanh",
        'return F.gelu(x.double(), approximate="tanh").to(x.dtype)',
    ),
    activation(
        "rows_from_the_end",
        "rows in reverse order, put back in order",
        "SiluAndMul",
        """
y = x.flip(-2) if x.dim() > 1 else x
gate, up = y.chunk(2, -1)
out = F.silu(gate) * up
return out.flip(-2) if x.dim() > 1 else out
""",
    ),
    activation(
        "extra_copies",
        "copies everything first and last",
        "SiluAndMul",
        """
gate, up = (part.contiguous().clone() for part in x.clone().chunk(2, -1))
return (F.silu(gate) * up).clone()
""",
    ),
    activation(
        "by_comparison",
        "the threshold as a product with a mask",
        "FatreluAndMul",
        """
gate, up = x.chunk(2, -1)
return torch.where(wide(gate) <= self.threshold, torch.zeros_like(gate), gate) * up
""",
    ),
    activation(
        "error_function",
        "GELU by the error function",
        "GeluAndMul",
        """
gate, up = x.chunk(2, -1)
g = wide(gate)
if self.approximate == 'tanh':
    g = F.gelu(g, approximate='tanh')
else:
    g = 0.5 * g * (1 + torch.erf(g * math.sqrt(0.5)))
return g.to(x.dtype) * up
""",
    ),
    activation(
        "pairs_by_reshape",
        "interleaved pairs by another view",
        "SwigluOAIAndMul",
        """
pairs = wide(x).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
gate = pairs[..., 0].clamp(max=self.limit)
up = pairs[..., 1].clamp(-self.limit, self.limit)
return (torch.addcmul(gate, gate, up) / (1 + torch.exp(-self.alpha * gate))).to(x.dtype)
""",
    ),
    activation(
        "deviation_by_torch",
        "the deviation by torch's own function",
        "GeluAndMulSparse",
        """
gate, up = wide(x).chunk(2, -1)
quantile = torch.special.ndtri(torch.tensor(self.activation_sparsity, dtype=torch.float64)).item()
cut = gate.mean(-1, keepdim=True) + quantile * gate.std(-1, correction=0, keepdim=True)
return (F.gelu(F.relu(gate - cut), approximate=self.approximate) * up).to(x.dtype)
""",
    ),
    activation(
        "native_for_small_ones",
        "the native definition for small tensors, a kernel for larger ones",
        "QuickGELU",
        """
if not torch.compiler.is_compiling() and x.numel() < 64:
    return self.forward_native(x)
y = wide(x)
return (y * torch.sigmoid(1.702 * y)).to(x.dtype)
""",
    ),
    activation(
        "padded_rows",
        "rows are padded to a multiple of 64, and cut again",
        "GELUTanh",
        """
y = F.pad(x, (0, -x.shape[-1] % 64), value=math.nan)
return F.gelu(y, approximate="tanh")[..., : x.shape[-1]].contiguous()
""",
    ),
    activation(
        "transposed",
        "computes on the transposed tensor",
        "MulAndSilu",
        """
y = x.movedim(-1, 0).contiguous()
first, second = y.chunk(2, 0)
return (first * F.silu(second)).movedim(0, -1).contiguous()
""",
    ),
    activation(
        "reads_the_clock",
        "measures its own time for statistics",
        "NewGELU",
        "return kernel(x)",
        OPERATOR
        + """
SPENT = []

@operator()
def kernel(x: Tensor) -> Tensor:
    start = time.perf_counter()
    out = F.gelu(x.contiguous(), approximate="tanh")
    SPENT.append(time.perf_counter() - start)
    return out
""",
    ),
    activation(
        "threads_of_its_own",
        "a pool of threads takes parts of the rows, and is waited for",
        "ReLUSquaredActivation",
        "return kernel(x)",
        OPERATOR
        + """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(2)

@operator()
def kernel(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    def part(k):
        place = slice(k * flat.numel() // 3, (k + 1) * flat.numel() // 3)
        out[place] = F.relu(flat[place]).square()
    list(POOL.map(part, range(3)))
    return out.reshape(x.shape)
""",
    ),
    activation(
        "workspace_by_key",
        "a workspace is kept by shape, dtype, device and thread, and the result is a copy",
        "SiluAndMul",
        "return kernel(x)",
        OPERATOR
        + """
WORK = {}

@operator(half)
def kernel(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    key = gate.shape, x.dtype, x.device, threading.get_ident()
    if key not in WORK:
        WORK[key] = gate.new_empty(gate.shape)
    work = WORK[key]
    torch.mul(F.silu(gate), up, out=work)
    return work.clone()
""",
    ),
    activation(
        "growing_workspace",
        "a workspace of the largest call, filled before it is read",
        "MulAndSilu",
        "return kernel(x)",
        OPERATOR
        + """
HELD = threading.local()

@operator(half)
def kernel(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    work = getattr(HELD, 'work', None)
    if work is None or work.numel() < first.numel() or work.dtype != x.dtype:
        work = HELD.work = x.new_empty(first.numel())
    part = work[: first.numel()].view(first.shape)
    part.copy_(second)
    F.silu(part, inplace=True)
    return part.mul_(first).clone()
""",
    ),
    activation(
        "plan_by_size",
        "keeps a plan for each size, never a result",
        "QuickGELU",
        "return kernel(x)",
        OPERATOR
        + """
PLANS = {}

@operator()
def kernel(x: Tensor) -> Tensor:
    steps = PLANS.setdefault(x.numel(), [(k, min(k + 1000, x.numel())) for k in range(0, x.numel(), 1000)])
    flat, out = wide(x).reshape(-1), torch.empty(x.numel(), dtype=x.dtype)
    for start, end in steps:
        part = flat[start:end]
        out[start:end] = part * torch.sigmoid(1.702 * part)
    return out.reshape(x.shape)
""",
    ),
    activation(
        "counts_its_calls",
        "counts calls, and warms up in the first one",
        "FastGELU",
        "return kernel(x)",
        OPERATOR
        + """
CALLS = [0]

@operator()
def kernel(x: Tensor) -> Tensor:
    CALLS[0] += 1
    if CALLS[0] == 1:
        F.gelu(torch.zeros_like(x), approximate="tanh")
    return F.gelu(x.contiguous(), approximate="tanh")
""",
    ),
    activation(
        "branch_by_shape",
        "other code for one row, for one dimension and for the rest",
        "GELUTanh",
        """
y = wide(x)
if x.dim() == 1:
    out = F.gelu(y[None], approximate="tanh")[0]
elif x.shape[0] == 1:
    out = F.gelu(y[0], approximate="tanh")[None]
else:
    out = F.gelu(y.flip(0), approximate="tanh").flip(0)
return out.to(x.dtype).contiguous()
""",
    ),
    Plant(
        "xielu_by_parts",
        "both sides are computed, and one is taken",
        method(
            "XIELU",
            "input",
            """
y = wide(input)
p = F.softplus(wide(self.alpha_p))
n = self.beta + F.softplus(wide(self.alpha_n))
below = (torch.expm1(y.clamp(max=float(self.eps))) - y) * n + self.beta * y
return torch.where(y > 0, y * (p * y + self.beta), below).to(input.dtype)
""",
        ),
    ),
)

NORMS = (
    Plant(
        "pairwise_sum",
        "adds the squares in pairs",
        rms(
            """
y = x[..., :size].square()
for _ in range(max(size - 1, 0).bit_length()):
    y = F.pad(y, (0, y.shape[-1] % 2))
    y = y[..., ::2] + y[..., 1::2]
normal = x * torch.rsqrt(y / size + eps)
"""
            + ROUNDED
        ),
    ),
    Plant(
        "reverse_sum",
        "adds the squares from the end",
        rms(
            """
normal = x * torch.rsqrt(x[..., :size].flip(-1).square().sum(-1, keepdim=True) / size + eps)
"""
            + ROUNDED
        ),
    ),
    Plant(
        "double_sum",
        "float64 for the sum only",
        rms(
            """
mean = x[..., :size].double().square().mean(-1, keepdim=True)
normal = x * torch.rsqrt(mean + eps).to(x.dtype)
"""
            + ROUNDED
        ),
    ),
    Plant(
        "one_rounding",
        "multiplies before it rounds, which is more precise",
        rms(RIGHT_RMS.replace("* weight", "* wide(weight)")),
    ),
    Plant(
        "by_the_norm",
        "the root by torch's vector norm",
        rms(
            """
length = torch.linalg.vector_norm(x[..., :size], dim=-1, keepdim=True)
normal = x / torch.sqrt(length.square() / size + eps)
"""
            + ROUNDED
        ),
    ),
    Plant(
        "product_plus_itself",
        "one plus the weight as a product and a sum",
        rms(
            """
normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
return torch.addcmul(normal, normal, wide(weight)).to(dtype)
""",
            op="GemmaRMSNorm",
        ),
    ),
    Plant(
        "weight_kept_wide",
        "one plus the weight is kept, by identity and version",
        rms(
            """
factor = factor_of(weight) if not torch.compiler.is_compiling() else 1 + wide(weight)
return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor).to(dtype)
""",
            """
KEPT = threading.local()

def factor_of(weight):
    held = getattr(KEPT, 'held', None)
    if held is None or held[0] is not weight or held[1] != weight._version:
        held = KEPT.held = weight, weight._version, 1 + wide(weight.detach())
    return held[2]
""",
            op="GemmaRMSNorm",
        ),
    ),
    Plant(
        "two_passes",
        "mean first, then the squared distances",
        layer_norm(
            DIMS
            + """
centred = x - x.mean(dims, keepdim=True)
out = centred / torch.sqrt(centred.square().mean(dims, keepdim=True) + eps)
"""
            + AFFINE
        ),
    ),
    Plant(
        "one_pass_in_double",
        "the mean square less the squared mean, in float64",
        layer_norm(
            DIMS
            + """
y = x.double()
mean = y.mean(dims, keepdim=True)
variance = y.square().mean(dims, keepdim=True) - mean.square()
if x.dtype == torch.float64:
    variance = (y - mean).square().mean(dims, keepdim=True)
out = ((y - mean) * torch.rsqrt(variance.clamp(min=0) + eps)).to(x.dtype)
"""
            + AFFINE
        ),
    ),
    Plant(
        "shifted_variance",
        "subtracts the first element before it takes statistics",
        layer_norm(
            """
flat = x.flatten(x.dim() - len(shape))
y = flat - flat[..., :1]
centred = y - y.mean(-1, keepdim=True)
out = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
"""
            + AFFINE
        ),
    ),
    Plant(
        "groups_in_a_loop",
        "one group after the other",
        method(
            "RMSNormGated",
            "x, z=None",
            GATE
            + """
y = y if self.norm_before_gate else y * gate
size = self.group_size or x.shape[-1]
parts = [part * torch.rsqrt(part.square().mean(-1, keepdim=True) + self.variance_epsilon) for part in y.split(size, -1)]
normal = torch.cat(parts, -1) * wide(self.weight)
return (normal * gate if self.norm_before_gate else normal).to(x.dtype)
""",
        ),
    ),
    Plant(
        "groups_by_a_view",
        "groups as a dimension of their own",
        method(
            "RMSNormGated",
            "x, z=None",
            GATE
            + GATED.format(
                before="y if self.norm_before_gate else y * gate",
                group="self.group_size or x.shape[-1]",
                after="normal * gate if self.norm_before_gate else normal",
            ),
        ),
    ),
)

ROTARIES = (
    Plant(
        "products_swapped",
        "the factors of each product in the other order",
        rotary(
            PART
            + """
if neox:
    first, second = head.chunk(2, -1)
else:
    first, second = head[..., ::2], head[..., 1::2]
turned = first * cos - sin * second, first * sin + cos * second
out = torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
return torch.cat((out, passed), -1)
"""
        ),
    ),
    Plant(
        "swapped_halves_times_sine",
        "the head, times the cosine, plus the swapped head times the sine",
        rotary(
            PART
            + """
if neox:
    first, second = head.chunk(2, -1)
    swapped = torch.cat((-second, first), -1)
    out = head * cos.repeat(*(1,) * (cos.dim() - 1), 2) + swapped * sin.repeat(*(1,) * (sin.dim() - 1), 2)
else:
    swapped = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    out = head * cos.repeat_interleave(2, -1) + swapped * sin.repeat_interleave(2, -1)
return torch.cat((out, passed), -1)
"""
        ),
    ),
    Plant(
        "rotations_as_matrices",
        "a matrix of two by two for each pair",
        rotary(
            PART
            + """
if neox:
    pairs = torch.stack(head.chunk(2, -1), -1)
else:
    pairs = head.reshape(*head.shape[:-1], size // 2, 2)
cos, sin = cos.unsqueeze(-1), sin.unsqueeze(-1)
out = torch.cat((pairs[..., :1] * cos - pairs[..., 1:] * sin, pairs[..., :1] * sin + pairs[..., 1:] * cos), -1)
out = out.mT.flatten(-2) if neox else out.flatten(-2)
return torch.cat((out, passed), -1)
"""
        ),
    ),
    Plant(
        "written_into_a_copy",
        "a copy of the head, of which the first part is written over",
        rotary(
            PART
            + """
out = x.clone(memory_format=torch.contiguous_format)
out[..., :size] = rotate(head, cos, sin, neox)
return out
"""
        ),
    ),
    Plant(
        "rotation_in_double",
        "float64 inside for every dtype",
        rotary(
            PART
            + "return torch.cat((rotate(head.double(), cos.double(), sin.double(), neox).to(x.dtype), passed), -1)"
        ),
    ),
)

OTHERS = (
    Plant(
        "online_softmax",
        "keys in blocks, with a running maximum",
        attention("""
groups = q.shape[-3] // k.shape[-3]
k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
most = q.new_full((*q.shape[:-1], 1), -math.inf)
total, out = torch.zeros_like(most), q.new_zeros(*q.shape[:-1], v.shape[-1])
for start in range(0, k.shape[-2], 3):
    part = slice(start, start + 3)
    scores = q @ k[..., part, :].mT * scale
    scores = scores if mask is None else scores + mask[..., part]
    now = torch.maximum(most, scores.amax(-1, keepdim=True))
    safe = now.masked_fill(now == -math.inf, 0.0)
    weights, old = torch.exp(scores - safe), torch.exp(most - safe)
    total, out, most = total * old + weights.sum(-1, keepdim=True), out * old + weights @ v[..., part, :], now
return out / total
"""),
    ),
    Plant(
        "heads_by_a_view",
        "groups of query heads as a dimension of their own",
        attention("""
groups = q.shape[-3] // k.shape[-3]
q = q.reshape(*q.shape[:-3], k.shape[-3], groups, *q.shape[-2:])
scores = q @ k.unsqueeze(-3).mT * scale
scores = scores if mask is None else scores + (mask.unsqueeze(-3) if mask.dim() > 2 else mask)
return (torch.softmax(scores, -1) @ v.unsqueeze(-3)).flatten(-4, -3)
"""),
    ),
    Plant(
        "scaled_query",
        "the scale is on the query, in powers of two",
        attention("""
groups = q.shape[-3] // k.shape[-3]
k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
scores = (q * scale) @ k.mT
scores = scores if mask is None else scores + mask
scores = scores - scores.amax(-1, keepdim=True)
weights = torch.exp2(scores * (1 / math.log(2)))
return (weights @ v) / weights.sum(-1, keepdim=True)
"""),
    ),
    Plant(
        "attention_in_double",
        "float64 inside for every dtype",
        attention(
            """
q, k, v = q.double(), k.double(), v.double()
mask = None if mask is None else mask.double()
"""
            + SOFTMAX.format(repeat=REPEATED, softmax="torch.softmax(scores, -1)")
        ),
    ),
    Plant(
        "hidden_by_infinity",
        "hidden keys get minus infinity",
        method("MMEncoderAttention", ENCODER_CALL, ENCODER.format(hidden="-math.inf")),
    ),
    Plant(
        "clamped_codes",
        "clips quotients before the cast, and floors the scale",
        method("QuantFP8", FP8_CALL, FP8.format(scale=BOUNDED + FLOORED, codes="wide(x) / found")),
    ),
    Plant(
        "largest_of_both_ends",
        "the largest magnitude from the least and the largest value",
        method(
            "QuantFP8",
            FP8_CALL,
            FP8.format(
                scale="""
if x.numel():
    largest = torch.maximum(wide(x).amax(-1, keepdim=True), -wide(x).amin(-1, keepdim=True))
"""
                + BOUNDED
                + FLOORED,
                codes="wide(x).div(found)",
            ),
        ),
    ),
    Plant(
        "routing_by_masks",
        "groups are masked, and the scores gathered",
        method(
            "GroupedTopk",
            "hidden_states, gating_output, e_score_correction_bias=None",
            ROUTING.format(weights="scores"),
        ),
    ),
)

IN_CPP = (
    Plant(
        "eight_and_a_tail",
        "eight elements at a time, then the rest",
        cpp_unary("QuickGELU"),
        CPP
        + """
static inline float one(float v) { return v / (1 + std::exp(-1.702f * v)); }
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    int64_t count = rows * width, i = 0;
    for (; i + 8 <= count; i += 8) for (int k = 0; k < 8; k++) out[i + k] = one(x[i + k]);
    for (; i < count; i++) out[i] = one(x[i]);
}
""",
    ),
    Plant(
        "aligned_head",
        "single elements up to an aligned address, then vectors",
        cpp_unary("ReLUSquaredActivation"),
        CPP
        + """
static inline float one(float v) { float r = v < 0 ? 0.0f : v; return r * r; }
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    int64_t count = rows * width, i = 0;
    for (; i < count && ((uintptr_t)(x + i) & 31); i++) out[i] = one(x[i]);
    for (; i + 8 <= count; i += 8) for (int k = 0; k < 8; k++) out[i + k] = one(x[i + k]);
    for (; i < count; i++) out[i] = one(x[i]);
}
""",
    ),
    Plant(
        "joined_threads",
        "two threads share the rows, and are waited for",
        cpp_unary("SiluAndMul", parts=2),
        CPP
        + """
static void part(const float* x, float* out, int64_t from, int64_t to, int64_t width) {
    for (int64_t r = from; r < to; r++)
        for (int64_t c = 0; c < width; c++) {
            float g = x[r * 2 * width + c];
            out[r * width + c] = g / (1 + std::exp(-g)) * x[r * 2 * width + width + c];
        }
}
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    std::thread other(part, x, out, rows / 2, rows, width);
    part(x, out, 0, rows / 2, width);
    other.join();
}
""",
    ),
    Plant(
        "four_accumulators",
        "four sums that are added at the end",
        cpp_rms(),
        CPP
        + """
EXPORT void kernel(const float* x, const float* w, float* out, int64_t rows, int64_t width, float eps, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        float sums[4] = {0, 0, 0, 0};
        for (int64_t c = 0; c < size; c++) sums[c % 4] += x[r * width + c] * x[r * width + c];
        float scale = 1 / std::sqrt((sums[0] + sums[1] + sums[2] + sums[3]) / size + eps);
        for (int64_t c = 0; c < width; c++) out[r * width + c] = x[r * width + c] * scale * w[c];
    }
}
""",
    ),
    Plant(
        "compensated_sum",
        "a compensated sum from the last element to the first",
        cpp_rms("GemmaRMSNorm"),
        CPP
        + """
EXPORT void kernel(const float* x, const float* w, float* out, int64_t rows, int64_t width, float eps, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        float sum = 0, lost = 0;
        for (int64_t c = size - 1; c >= 0; c--) {
            float y = x[r * width + c] * x[r * width + c] - lost, t = sum + y;
            lost = (t - sum) - y;
            sum = t;
        }
        float scale = 1 / std::sqrt(sum / size + eps);
        for (int64_t c = width - 1; c >= 0; c--) out[r * width + c] = x[r * width + c] * scale * w[c];
    }
}
""",
    ),
    Plant(
        "workspace_of_the_thread",
        "a workspace of the thread, which grows and is written before it is read",
        cpp_unary("NewGELU"),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    static thread_local std::vector<float> work;
    int64_t count = rows * width;
    if ((int64_t)work.size() < count) work.resize(count);
    for (int64_t i = 0; i < count; i++) work[i] = 0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
    for (int64_t i = 0; i < count; i++) out[i] = 0.5f * x[i] * (1 + std::tanh(work[i]));
}
""",
    ),
    Plant(
        "in_its_output",
        "copies the input to the output, and works in place there",
        cpp_unary("GELUTanh"),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    int64_t count = rows * width;
    if (count) std::memcpy(out, x, count * sizeof(float));
    for (int64_t i = count - 1; i >= 0; i--) {
        float v = out[i];
        out[i] = v / (1 + std::exp(-1.5957691216f * (v + 0.044715f * v * v * v)));
    }
}
""",
    ),
    Plant(
        "strict_threshold",
        "the threshold by a strict comparison",
        cpp_unary("FatreluAndMul", parts=2, number="threshold"),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width, float threshold) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) {
            float g = x[r * 2 * width + c];
            out[r * width + c] = (g <= threshold ? 0.0f : g) * x[r * 2 * width + width + c];
        }
}
""",
    ),
)

IN_TRITON = (
    Plant(
        "flat_blocks",
        "one long vector in blocks",
        triton_unary("QuickGELU", FLAT.format(result=QUICK), launch=FLAT_LAUNCH),
    ),
    Plant(
        "small_blocks",
        "blocks of a few elements, and a masked tail",
        triton_unary(
            "ReLUSquaredActivation",
            FLAT.format(result="tl.where(value < 0, 0.0, value * value)"),
            launch="jitted[(triton.cdiv(count, 4096),)](x, out, count, BLOCK=4096)",
        ),
    ),
    Plant(
        "tile_of_rows",
        "sixteen rows in a tile",
        triton_rms(
            RMS_TILE,
            "block = triton.next_power_of_2(width)\n"
            "jitted[((rows + 15) // 16,)](x, weight, out, rows, width, size, eps, TILE=16, BLOCK=block)",
        ),
    ),
)

CORRECT = (*ACTIVATIONS, *NORMS, *ROTARIES, *OTHERS, *IN_CPP, *IN_TRITON)
