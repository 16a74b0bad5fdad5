"""Code in a file of its own, by AOTInductor, for much of which torch has no public names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from opgraft.errors import CompilationError
from torch import Tensor, fx

Result = TypeVar("Result")

_OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,  # the tensors of the model are handed over when it is loaded
    "always_keep_tensor_constants": True,  # which a process may have others of
    "joint_graph_constant_folding": False,  # by which the value that a tensor of one element has now would be code
}

_LINES = "enable_line_tables"
"""The switch, of newer versions of torch, for what debuggers know of generated code: two thirds of a package."""


def write_package(module: fx.GraphModule, example: Sequence[Any], file: Path) -> None:
    """Compile a graph, and write its code to a file ``.pt2``, without its tensors.

    Args:
        module: the graph; its output is a tuple of tensors.
        example: the values of its placeholders, fake ones.
        file: to write.

    Raises:
        Exception: whatever compilers raise; the graph has something that cannot be written, or this torch no such way.
    """
    import torch._inductor.config as config
    import torch._inductor.package as packaging  # as long to import as torch itself

    write: Any = vars(packaging)["package_aoti"]
    options = {
        **_OPTIONS,
        **({f"aot_inductor.{_LINES}": False} if hasattr(config.aot_inductor, _LINES) else {}),
    }
    files: Any = trusting_processor(
        lambda: torch._inductor.aot_compile(module, tuple(example), options=options)
    )
    write(str(file), files)


def trusting_processor(compile: Callable[[], Result]) -> Result:
    """Have Inductor compile for the instruction sets that the processor names, without trying each of them out.

    To try them takes a third of what compiling a model does. Where it fails, as with a compiler that does not know them
    all, it is done again as Inductor does it by itself.
    """
    import torch._inductor.config as config
    import torch._inductor.cpu_vec_isa as instruction_sets

    compile = functools.partial(_quietly, compile)
    known: Any = getattr(instruction_sets, "valid_vec_isa_list", None)
    settings: Any = getattr(config, "cpp", None)
    if getattr(settings, "vec_isa_ok", "") is not None or not hasattr(known, "cache_info"):
        return compile()  # somebody has said whether to try, or another torch
    if known.cache_info().currsize:
        return compile()  # they are known already
    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            return compile()
    except Exception:  # whatever compilers raise, which raise it again if that was not why
        known.cache_clear()
        return compile()


def _quietly(compile: Callable[[], Result]) -> Result:
    """Compile without the warning of torch's about a class of its own that Inductor has copied, of which users know
    nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning
        )
        return compile()


class Package:
    """Code of ``write_package``, loaded: called with the tensors of the placeholders.

    Args:
        file: which it was written to.
        constants: the tensors of the graph by name, read where they are; writes to them are seen.

    Raises:
        Exception: whatever torch raises of a file that is damaged, or was made elsewhere.
    """

    def __init__(self, file: Path, constants: Mapping[str, Tensor]) -> None:
        self._loader = _loader(file)
        wanted = set(self._loader.get_constant_fqns())
        self._constants = {name: tensor for name, tensor in constants.items() if name in wanted}
        if len(self._constants) < len(wanted):
            raise KeyError(f"it wants the tensors {sorted(wanted - constants.keys())}")
        self._tensors = list(self._constants.values())
        self._layouts = self._found_layouts()
        # A thread that is in the code waits for Python where it calls ops in Python, and the next one would wait for
        # the code without letting go of Python.
        self._turn = Lock()
        self._load()

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the code; tensors of the model that have moved in memory are looked up again first.

        Raises:
            CompilationError: one of those has another dtype, device, shape or strides now, which the code cannot read.
        """
        with self._turn:
            if places_of(self._tensors) != self._places:
                self._expect_same_layouts()
                self._load()
            results: Sequence[Tensor] = self._loader.boxed_run(list(tensors))
        return results

    def _found_layouts(self) -> list[tuple[Any, ...]]:
        return [
            (each.dtype, each.device, tuple(each.shape), each.stride()) for each in self._tensors
        ]

    def _expect_same_layouts(self) -> None:
        for name, before, now in zip(
            self._constants, self._layouts, self._found_layouts(), strict=True
        ):
            if now != before:
                raise CompilationError(
                    f"the tensor {name} of the model was {_told(*before)}, and is {_told(*now)}, as by .to() or .data: "
                    "compile the model anew"
                )

    def _load(self) -> None:
        # By reference, so they must stay alive; parameters as they are, as kernels ask what was declared of them.
        self._kept = dict(self._constants)
        self._places = places_of(self._tensors)
        if self._kept:
            self._loader.load_constants(self._kept, False, True, True)


def places_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return what is soon looked up of tensors, and changes where one gets other memory or is transposed."""
    return list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors))


def _told(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...]
) -> str:
    return f"{dtype} of shape {shape} and strides {strides} on {device}"


def _loader(file: Path) -> Any:
    try:
        make = torch._C._aoti.AOTIModelPackageLoader
    except AttributeError:  # another torch: by its public function, which imports Inductor first
        return torch._inductor.aoti_load_package(str(file)).loader
    return make(str(file), "model", False, 1, -1)
