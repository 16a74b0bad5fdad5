"""Write compiled code to a file, and load it. Torch has few public names for AOTInductor."""

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
    # The process that loads the code hands over the tensors of the model.
    "aot_inductor.package_constants_in_so": False,
    # That process may have other values in them.
    "always_keep_tensor_constants": True,
    # Folding would write the present value of a tensor with one element into the code.
    "joint_graph_constant_folding": False,
}

_LINES = "enable_line_tables"
"""The switch of newer torch for line tables. For debuggers, they fill two thirds of a file."""


def write_package(module: fx.GraphModule, example: Sequence[Any], file: Path) -> None:
    """Compile a graph, and write the code to a file ``.pt2``, without the tensors of the model.

    Args:
        module: the graph. The output is a tuple of tensors.
        example: fake tensors for the placeholders.
        file: the file to write.

    Raises:
        Exception: any error of a compiler. The graph cannot be written, or this torch cannot write.
    """
    # These imports take as long as torch itself.
    import torch._inductor.config as config
    import torch._inductor.package as packaging

    write: Any = vars(packaging)["package_aoti"]
    options = dict(_OPTIONS)
    if hasattr(config.aot_inductor, _LINES):
        options[f"aot_inductor.{_LINES}"] = False
    files: Any = trusting_processor(
        lambda: torch._inductor.aot_compile(module, tuple(example), options=options)
    )
    write(str(file), files)


def trusting_processor(compile: Callable[[], Result]) -> Result:
    """Compile with Inductor for the instruction sets of this processor, without a trial of each.

    The trials take a third of the time to compile a model. If the first attempt fails, for example
    with a compiler that does not know an instruction set, compile again with the trials.
    """
    import torch._inductor.config as config
    import torch._inductor.cpu_vec_isa as instruction_sets

    compile = functools.partial(_quietly, compile)
    known: Any = getattr(instruction_sets, "valid_vec_isa_list", None)
    settings: Any = getattr(config, "cpp", None)
    is_set = getattr(settings, "vec_isa_ok", "") is not None
    # The user has decided about trials, or this torch has other names.
    if is_set or not hasattr(known, "cache_info"):
        return compile()
    has_tried = known.cache_info().currsize > 0
    if has_tried:
        return compile()
    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            return compile()
    # Compilers raise anything. A fault of another kind is raised again below.
    except Exception:
        known.cache_clear()
        return compile()


def _quietly(compile: Callable[[], Result]) -> Result:
    """Compile without a warning about a class of torch. Inductor copies the class, not the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning
        )
        return compile()


class Package:
    """Loaded code of ``write_package``. A call takes the tensors of the placeholders.

    Args:
        file: written by ``write_package``.
        constants: the tensors of the graph by name. The code reads them in place and sees writes.

    Raises:
        Exception: any error of torch. The file is damaged, or was made for another machine.
    """

    def __init__(self, file: Path, constants: Mapping[str, Tensor]) -> None:
        self._loader = _loader(file)
        wanted = set(self._loader.get_constant_fqns())
        absent = sorted(wanted - constants.keys())
        if absent:
            raise KeyError(f"it wants the tensors {absent}")
        self._constants = {name: tensor for name, tensor in constants.items() if name in wanted}
        self._tensors = list(self._constants.values())
        self._layouts = self._found_layouts()
        # The code waits for the interpreter when it calls an op in Python. A second thread would
        # wait for the code and hold the interpreter.
        self._turn = Lock()
        self._load()

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the code. Hand over tensors of the model again if one has moved in memory.

        Raises:
            CompilationError: a moved tensor has another dtype, device, shape or strides.
        """
        with self._turn:
            if places_of(self._tensors) != self._places:
                self._expect_same_layouts()
                self._load()
            results: Sequence[Tensor] = self._loader.boxed_run(list(tensors))
        return results

    def _found_layouts(self) -> list[tuple[Any, ...]]:
        return [(x.dtype, x.device, tuple(x.shape), x.stride()) for x in self._tensors]

    def _expect_same_layouts(self) -> None:
        layouts = zip(self._layouts, self._found_layouts(), strict=True)
        for name, (before, now) in zip(self._constants, layouts, strict=True):
            if now == before:
                continue
            raise CompilationError(
                f"the tensor {name} of the model was {_layout_in_words(*before)}, and is "
                f"{_layout_in_words(*now)}, as by .to() or .data: compile the model anew"
            )

    def _load(self) -> None:
        # The code holds no reference, so the dict keeps the tensors alive. A parameter stays a
        # parameter: kernels read its attributes.
        self._kept = dict(self._constants)
        self._places = places_of(self._tensors)
        if self._kept:
            self._loader.load_constants(self._kept, False, True, True)


def places_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return addresses and strides, to notice a tensor with other memory or order."""
    return list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors))


def _layout_in_words(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...]
) -> str:
    return f"{dtype} of shape {shape} and strides {strides} on {device}"


def _loader(file: Path) -> Any:
    try:
        make = torch._C._aoti.AOTIModelPackageLoader
    except AttributeError:
        # Another torch. The public function imports Inductor, which takes long.
        return torch._inductor.aoti_load_package(str(file)).loader
    return make(str(file), "model", False, 1, -1)
