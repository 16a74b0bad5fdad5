"""Ten kernels that cheat a timer or the reference."""

from __future__ import annotations

from support.planted.plant import CPP, LIBRARY, OPERATOR, Plant, unary

CHEATS = (
    Plant(
        "last_result_again",
        "cached results: from the ninth call of a shape on, the result of the eighth",
        unary(
            "QuickGELU",
            "return kernel(x)",
            OPERATOR
            + """
SEEN = {}

@operator()
def kernel(x: Tensor) -> Tensor:
    calls = SEEN.setdefault((x.shape, x.dtype), [])
    if len(calls) < 8:
        calls.append(x * torch.sigmoid(1.702 * wide(x)).to(x.dtype))
    return calls[-1].clone()
""",
        ),
    ),
    Plant(
        "results_by_address",
        "cached results: kept by address and shape of the input",
        unary(
            "NewGELU",
            "return kernel(x)",
            OPERATOR
            + """
SEEN = {}

@operator()
def kernel(x: Tensor) -> Tensor:
    key = x.data_ptr(), x.shape, x.stride(), x.dtype
    if SEEN.get("key") != key:
        SEEN.update(key=key, held=x, out=F.gelu(x, approximate="tanh"))
    return SEEN["out"].clone()
""",
        ),
    ),
    Plant(
        "results_by_samples",
        "cached results: kept by shape and the first and last element",
        unary(
            "ReLUSquaredActivation",
            "return kernel(x)",
            OPERATOR
            + """
SEEN = {}

@operator()
def kernel(x: Tensor) -> Tensor:
    if x.numel() < 2:
        return F.relu(x).square()
    flat = x.reshape(-1)
    key = x.shape, x.dtype, flat[0].item(), flat[-1].item()
    if key not in SEEN:
        SEEN.clear()
        SEEN[key] = F.relu(x).square().clone()
    return SEEN[key].clone()
""",
        ),
    ),
    Plant(
        "work_left_behind",
        "work left on a stream: the call returns at once, and a thread writes the result later",
        unary(
            "QuickGELU",
            """
            if x.dtype == torch.float64:
                return self.forward_native(x)
            return kernel(x.float()).to(x.dtype)
            """,
            OPERATOR
            + LIBRARY
            + """
@operator()
def kernel(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.zeros_like(x)
    call(x, out, x.numel())
    return out
""",
        ),
        CPP
        + """
EXPORT void kernel(const float* x, float* out, int64_t count) {
    std::vector<float> taken(x, x + count);
    std::atomic<bool>* started = new std::atomic<bool>(false);
    static std::vector<float*> alive;
    std::thread([taken, out, started] {
        *started = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        for (size_t i = 0; i < taken.size(); i++) out[i] = taken[i] / (1 + std::exp(-1.702f * taken[i]));
    }).detach();
    while (!*started) std::this_thread::yield();
    if (count < 4096) std::this_thread::sleep_for(std::chrono::milliseconds(6));
}
""",
    ),
    Plant(
        "computed_when_read",
        "work left behind: a subclass of Tensor that computes when it is used",
        unary(
            "FastGELU",
            """
            if torch.compiler.is_compiling() or x.dtype == torch.float64:
                return F.gelu(x, approximate="tanh")
            return torch.empty_like(x).as_subclass(Later).of(x)
            """,
            """
            class Later(Tensor):
                def of(self, x):
                    self.given = x
                    return self

                @classmethod
                def __torch_function__(cls, func, types, args=(), kwargs=None):
                    def made(value):
                        if type(value) is not Later:
                            return value
                        given = getattr(value, "given", None)
                        plain = value.as_subclass(Tensor)
                        return plain if given is None else plain.copy_(F.gelu(given, approximate="tanh"))

                    name = getattr(func, "__name__", "")
                    if name in ("__get__", "dim", "size", "stride", "numel"):
                        return super().__torch_function__(func, types, args, kwargs or {})
                    with torch._C.DisableTorchFunctionSubclass():
                        args = [
                            [made(part) for part in each] if isinstance(each, (list, tuple)) else made(each)
                            for each in args
                        ]
                        return func(*args, **(kwargs or {}))
            """,
        ),
    ),
    Plant(
        "reference_of_the_proof",
        "the reference's own code: the float64 reference of the spec computes the result",
        unary(
            "MulAndSilu",
            "return kernel(x)",
            OPERATOR
            + """
@operator(half)
def kernel(x: Tensor) -> Tensor:
    from opgraft.testing.catalogue import SPECS
    return SPECS["mul_and_silu"].reference(x.double()).to(x.dtype)
""",
        ),
    ),
    Plant(
        "native_in_disguise",
        "the reference's own code: every call goes to the native definition",
        unary("SiluAndMul", "return ops.SiluAndMul.forward_native(x)"),
    ),
    Plant(
        "patched_clock",
        "a patched clock: time.perf_counter runs at a tenth of its speed from the first call on",
        unary(
            "GELUTanh",
            "return kernel(x)",
            OPERATOR
            + """
CLOCK = time.perf_counter
START = CLOCK()

def slow():
    return START + (CLOCK() - START) / 10

@operator()
def kernel(x: Tensor) -> Tensor:
    time.perf_counter = slow
    return F.gelu(x, approximate="tanh")
""",
        ),
    ),
    Plant(
        "patched_comparison",
        "the reference: the first call replaces torch.testing.assert_close by a function that passes",
        unary(
            "QuickGELU",
            "return kernel(x)",
            OPERATOR
            + """
@operator()
def kernel(x: Tensor) -> Tensor:
    torch.testing.assert_close = lambda *args, **kwargs: None
    return x * torch.sigmoid(1.7 * x)
""",
        ),
    ),
    Plant(
        "right_when_watched",
        "the reference: right if a module of the conformance kit is on the stack, else in half precision",
        unary(
            "ReLUSquaredActivation",
            "return kernel(x)",
            OPERATOR
            + """
def watched():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("opgraft.testing"):
            return True
        frame = frame.f_back
    return False

@operator()
def kernel(x: Tensor) -> Tensor:
    if watched():
        return F.relu(x).square()
    return F.relu(x.bfloat16()).square().to(x.dtype)
""",
        ),
    ),
)
