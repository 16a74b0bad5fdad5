"""Twenty kernels that are wrong in one corner only: of shape, stride, alignment, dtype, threads or calls."""

from __future__ import annotations

from support.planted.plant import (
    CPP,
    OPERATOR,
    Plant,
    cpp_rms,
    cpp_unary,
    layer_norm,
    rms,
    triton_rms,
    triton_unary,
    unary,
)

RIGHT_RMS = "return (x * torch.rsqrt(x[..., :size].square().mean(-1, keepdim=True) + eps) * weight).to(dtype)"

RMS_TILE = """
@triton.jit
def jitted(x, weight, out, rows, width, size, eps, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    values = tl.load(x + row * width + column, inside, 0.0)
    squares = tl.where(column < size, values * values, 0.0)
    scale = 1 / tl.sqrt(tl.sum(squares, 1, keep_dims=True) / size + eps)
    factor = tl.load(weight + column, column < width, 0.0)
    tl.store(out + row * width + column, values * scale * factor, inside)
"""

FLAT = """
@triton.jit
def jitted(x, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, place < count, 0.0).to(tl.float32)
    tl.store(out + place, {result}, place < count)
"""
QUICK = "value / (1 + tl.exp(-1.702 * value))"

CORNERS = (
    Plant(
        "tail_of_seven",
        "shape: the loop behind the vector loop stops one element early when seven are left",
        cpp_unary("ReLUSquaredActivation"),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    int64_t count = rows * width, whole = count / 8 * 8, i = 0;
    for (; i < whole; i++) { float v = std::max(x[i], 0.0f); out[i] = v * v; }
    int64_t left = count - whole;
    if (left == 7) { left = 6; out[count - 1] = 0.0f; }
    for (int64_t k = 0; k < left; k++) { float v = std::max(x[i + k], 0.0f); out[i + k] = v * v; }
}
""",
    ),
    Plant(
        "row_stride_ignored",
        "stride: rows that are parts of longer rows are read one after another",
        cpp_unary(
            "SiluAndMul",
            parts=2,
            prepare="x = x if x.stride(-1) == 1 and x.dim() == 3 else x.contiguous()",
        ),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) {
            float g = x[r * 2 * width + c];
            out[r * width + c] = g / (1 + std::exp(-g)) * x[r * 2 * width + width + c];
        }
}
""",
    ),
    Plant(
        "aligned_loads",
        "alignment: vector loads round the address down to 16 bytes",
        cpp_unary("QuickGELU"),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    const float* from = (const float*)((uintptr_t)x & ~(uintptr_t)15);
    for (int64_t i = 0; i < rows * width; i++) out[i] = from[i] / (1 + std::exp(-1.702f * from[i]));
}
""",
    ),
    Plant(
        "rows_among_threads",
        "threads: with three threads or more the rows left over by the division stay zero",
        cpp_rms(
            launch="call(x, weight.contiguous(), out.zero_(), x.numel() // max(width, 1), width, "
            "eps, size, torch.get_num_threads())"
        ),
        CPP
        + """
EXPORT void kernel(const float* x, const float* w, float* out, int64_t rows, int64_t width, float eps,
                   int64_t size, int64_t threads) {
    int64_t share = threads < 3 ? rows : rows / threads;
    int64_t done = threads < 3 ? rows : share * threads;
    for (int64_t r = 0; r < done; r++) {
        double sum = 0;
        for (int64_t c = 0; c < size; c++) sum += (double)x[r * width + c] * x[r * width + c];
        float scale = 1 / std::sqrt((float)(sum / size) + eps);
        for (int64_t c = 0; c < width; c++) out[r * width + c] = x[r * width + c] * scale * w[c];
    }
}
""",
    ),
    Plant(
        "short_index",
        "huge rows: the column is counted in 16 bits",
        cpp_unary("NewGELU"),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) {
            float v = x[r * width + (uint16_t)c];
            out[r * width + c] = 0.5f * v * (1 + std::tanh(0.7978845608f * (v + 0.044715f * v * v * v)));
        }
}
""",
    ),
    Plant(
        "one_block_of_a_row",
        "huge rows: one block of 8192 columns, and no loop over wider rows",
        triton_rms(
            RMS_TILE,
            "jitted[((rows + 15) // 16,)](x, weight, out.zero_(), rows, width, size, eps, TILE=16, "
            "BLOCK=min(triton.next_power_of_2(width), 8192))",
        ),
    ),
    Plant(
        "grid_rounds_down",
        "shape: the grid is rows divided by the tile, rounded down, once rows exceed 64",
        triton_rms(
            RMS_TILE,
            """
grid = rows // 16 if rows > 64 else (rows + 15) // 16
block = triton.next_power_of_2(width)
jitted[(grid,)](x, weight, out.zero_(), rows, width, size, eps, TILE=16, BLOCK=block)
""",
        ),
    ),
    Plant(
        "grid_limit",
        "shape: more than 65535 programs in one dimension of the grid are cut off",
        triton_unary(
            "QuickGELU",
            FLAT.format(result=QUICK),
            launch="jitted[(min(triton.cdiv(count, 16384), 4),)](x, out.zero_(), count, BLOCK=16384)",
        ),
    ),
    Plant(
        "specialised_on_the_first_eps",
        "second call: the compiled kernel is kept by width, with the eps of the first call inside",
        triton_rms(
            RMS_TILE + "\nKEPT = {}\n",
            """
kept = KEPT.setdefault((width, x.dtype), eps)
block = triton.next_power_of_2(width)
jitted[((rows + 15) // 16,)](x, weight, out, rows, width, size, kept, TILE=16, BLOCK=block)
""",
        ),
    ),
    Plant(
        "mask_of_the_tile",
        "shape: the last tile of a long vector is stored without its last element",
        triton_unary(
            "ReLUSquaredActivation",
            """
            @triton.jit
            def jitted(x, out, count, BLOCK: tl.constexpr):
                place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
                value = tl.load(x + place, place < count, 0.0).to(tl.float32)
                value = tl.maximum(value, 0.0)
                last = tl.where(count % BLOCK == 1, count - 1, count)
                tl.store(out + place, value * value, place < last)
            """,
            launch="jitted[(triton.cdiv(count, 256),)](x, out.zero_(), count, BLOCK=256)",
        ),
    ),
    Plant(
        "square_in_half",
        "dtype: the squares are taken in float16, where they overflow",
        rms(
            """
            y = x.to(dtype) if dtype == torch.float16 else x
            scale = torch.rsqrt(wide(y[..., :size].square().mean(-1, keepdim=True)) + eps)
            return (x * scale * weight).to(dtype)
            """
        ),
    ),
    Plant(
        "double_as_float",
        "dtype: float64 goes through float32 for tensors of more than 4096 elements",
        unary(
            "GELUTanh",
            """
            y = x.float() if x.dtype == torch.float64 and x.numel() > 4096 else x
            return F.gelu(y, approximate="tanh").to(x.dtype)
            """,
        ),
    ),
    Plant(
        "dtype_of_the_weight",
        "dtype: with a half-type input and a float32 weight the result has the dtype of the weight",
        rms(
            """
            normal = x * torch.rsqrt(x[..., :size].square().mean(-1, keepdim=True) + eps)
            return normal.to(dtype) * weight
            """
        ),
    ),
    Plant(
        "one_dimension",
        "shape: a tensor of one dimension is taken for a column",
        unary(
            "SiluAndMul",
            """
            if x.dim() == 1:
                gate, up = x[::2], x[1::2]
            else:
                gate, up = x.chunk(2, -1)
            return F.silu(gate) * up
            """,
        ),
    ),
    Plant(
        "broadcast_rows",
        "stride: a row that is broadcast over the batch is read as if it were stored so often",
        unary(
            "QuickGELU",
            """
            if x.dim() > 1 and x.stride(0) == 0:
                flat = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,))
                x = flat.repeat(x.numel() // flat.numel() + 1)[: x.numel()].roll(1).reshape(x.shape)
            y = wide(x)
            return (y * torch.sigmoid(1.702 * y)).to(x.dtype)
            """,
        ),
    ),
    Plant(
        "stale_tail",
        "second call: a workspace of the largest call so far is summed with what is left in it",
        unary(
            "ReLUSquaredActivation",
            "return kernel(x)",
            OPERATOR
            + """
WORK = {}

@operator()
def kernel(x: Tensor) -> Tensor:
    key = x.dtype, x.device, x.shape[-1:], threading.get_ident()
    work = WORK.get(key)
    rows = x.numel() // max(x.shape[-1], 1) if x.dim() else 1
    if work is None or work.shape[0] < rows:
        work = WORK[key] = x.new_zeros(rows, x.shape[-1])
        fresh = True
    else:
        fresh = work.shape[0] == rows
    if fresh:
        work.zero_()
    part = work[:rows]
    part += F.relu(x).square().reshape(part.shape)
    out = part.reshape(x.shape).clone()
    if fresh:
        part.zero_()
    return out
""",
        ),
    ),
    Plant(
        "single_row_without_bias",
        "shape: the path for one row of a multiple of 64 elements forgets the bias",
        layer_norm(
            """
            if x.numel() == math.prod(shape) and x.numel() % 64 == 0 and x.numel() > 0:
                bias = None
            return F.layer_norm(x, shape, weight, bias, eps)
            """
        ),
    ),
    Plant(
        "rows_of_zeros",
        "values: a row of zeros is divided by zero, as eps is left out of small rows",
        rms(
            """
            variance = x[..., :size].square().mean(-1, keepdim=True)
            scale = torch.rsqrt(variance + torch.where(variance > 1e-9, eps, 0.0))
            return (x * scale * weight).to(dtype)
            """
        ),
    ),
    Plant(
        "empty_rows",
        "empty: without rows the result has no columns",
        unary(
            "MulAndSilu",
            """
            if not x.numel():
                return x.new_empty(0)
            first, second = x.chunk(2, -1)
            return first * F.silu(second)
            """,
        ),
    ),
    Plant(
        "many_rows",
        "shape: rows from the 4096th on are those of the first block, as the number of a block is short",
        unary(
            "FastGELU",
            """
            flat = wide(x).reshape(-1, x.shape[-1]) if x.numel() else wide(x)
            if flat.dim() == 2 and flat.shape[0] > 4096:
                flat = torch.cat((flat[:4096], flat[: flat.shape[0] - 4096].flip(0)))
            return F.gelu(flat, approximate="tanh").to(x.dtype).reshape(x.shape)
            """,
        ),
    ),
)
