"""Settings of compilation, and of which custom ops are enabled."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from opgraft.config.declaration import KINDS, Kind, Section, setting
from opgraft.errors import ConfigError


class CompilationMode(enum.IntEnum):
    """The way in which a model built under this config is meant to be compiled; vLLM's names and numbers.

    ``NONE``: not at all. ``STOCK_TORCH_COMPILE``: by ``torch.compile``. ``DYNAMO_TRACE_ONCE``: by one trace of Dynamo,
    without its guards. ``FULL``, which vLLM calls ``VLLM_COMPILE``: by the host's own passes and pieces.
    ``TORCH_COMPILE`` is the older name of ``STOCK_TORCH_COMPILE``. All but ``NONE`` let custom ops default to ``none``
    where ``backend`` is ``inductor``.
    """

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    FULL = 3
    TORCH_COMPILE = 1
    VLLM_COMPILE = 3


def _mode(value: Any) -> Any:
    """Return the mode of a name or a number; another value as it is, for the check of its type to reject."""
    names = CompilationMode.__members__
    text = str(value)
    if isinstance(value, str) and text.upper() in names:
        return names[text.upper()]
    known = re.fullmatch("[0-9]", text) and int(text) in tuple(CompilationMode)
    return CompilationMode(int(text)) if known else value


_MODES = f"one of {', '.join(CompilationMode.__members__)} or a number from 0 to 3"
KINDS["CompilationMode"] = Kind(
    "MODE",
    _MODES,
    lambda value: isinstance(value, CompilationMode),
    lambda text, source: text,
    _mode,
)


LEVELS: tuple[Mapping[str, Any], ...] = (
    {"mode": CompilationMode.NONE},
    {"mode": CompilationMode.FULL, "backend": "eager"},
    {"mode": CompilationMode.FULL, "custom_ops": ("+linear",)},
    {"mode": CompilationMode.FULL, "custom_ops": ("+linear",), "compile_sizes": (1,)},
)
"""Settings of a ``CompilationConfig`` that each level fills, where nothing else sets them.

Level 1 generates no code, so it starts soon. At levels above, linear layers keep their kernel for packed weights."""

GRAPH_MODES = ("none", "piecewise", "full")
"""The parts of a call that static graphs record: none, each piece between ``splitting_ops``, or the whole."""

ATTENTION = (
    "opgraft::attend_layer",
    "opgraft::paged_attention",
    "opgraft::mla_paged_attention",
    "opgraft::scaled_dot_product_attention",
    "aten::scaled_dot_product_attention",
)
"""The operators that split a graph for ``piecewise`` unless ``splitting_ops`` says otherwise."""

CAPTURE_SIZES = (1, 2, 4, 8, 16, 32)
"""Sizes of the batch with a static graph unless ``capture_sizes`` says otherwise."""

_MOST = 1 << 31
"""Rows that no batch has."""

PACKAGED = ("inductor",)
"""Backends whose code can be written to a file."""

DEFAULT_LEVEL = 2
"""The level of those who ask for compilation, and not for how much of it."""


def is_packaged(mode: CompilationMode | None, backend: str | None) -> bool:
    """Tell whether there is code that the cache could keep."""
    return mode in (CompilationMode.FULL, CompilationMode.DYNAMO_TRACE_ONCE) and backend in PACKAGED


@dataclass(frozen=True)
class CompilationConfig(Section):
    """The settings of compilation, and of which custom ops are enabled.

    Attributes:
        custom_ops: ``all``, ``none`` or ``auto`` (one of them at most), ``+op``, ``-op``; ``["none,+a"]`` is
            ``["none", "+a"]``. Without ``all`` and ``none``, ``none`` holds if ``backend`` is ``inductor`` and ``mode``
            is not ``NONE``, else ``all``. Under ``auto`` an op that is enabled so takes what was measured to be best.
        backend: name of the ``torch.compile`` backend.
        mode: a ``CompilationMode``, its name or its number.
        user_passes: passes that run after opgraft's own, under the mode ``FULL``: each as ``module:Class``, as a class
            that derives from ``GraphPass``, or as an object of one.
        dump_graphs: a folder for the graph before the first pass and after each, likewise.
        fail_on_recompile: on devices whose programs have fixed shapes, all compiled before the first request.
        level: from 0, which compiles nothing, to 3; sets what ``LEVELS`` says of the fields that nothing else sets.
        compile_sizes: sizes of the batch that have code of their own, under the mode ``FULL``.
        compile_ranges: ranges of such sizes, as ``"2-16"``, each of which has code of its own, likewise.
        pass_config: passes of opgraft, each to whether it runs, likewise.
        cache: False keeps no generated code. True requires the cache: a folder that cannot be used,
            or a mode without code to keep, is an error. By default the cache is on if there is code.
        cache_folder: where.
        cache_bytes: that it may take.
        cache_remote: folder of fsspec, or a path, that caches of several machines share.
        cache_key: file of the key that signs what is in it.
        tuning_file: what ``opgraft tune`` has measured on this machine, for ``custom_ops`` ``auto``.
        splitting_ops: operators that cut the graph into pieces, ``namespace::name``; ``ATTENTION`` if this is
            not set and ``graph_mode`` is ``piecewise``. The operators themselves run as they are, in no compiled code.
        graph_mode: one of ``GRAPH_MODES``.
        capture_sizes: sizes of the batch with a recorded static graph; a call is padded to the next size.
    """

    section: ClassVar[str] = "compilation_config"

    custom_ops: Sequence[str] | None = setting(
        "which ops are enabled: all or none, or auto, which takes what was measured to be best; +op and -op",
        default=(),
        variable="OPGRAFT_CUSTOM_OPS",
    )
    backend: str | None = setting(
        "the torch.compile backend that models are meant for", default="inductor"
    )
    mode: CompilationMode | None = setting("how models are compiled", default=CompilationMode.NONE)
    user_passes: Sequence[Any] = setting(
        "passes over the graph that run after opgraft's own, as module:Class, or in Python a class or an object; for "
        "the mode FULL",
        default=(),
    )
    dump_graphs: str | None = setting(
        "folder for the graph before the first pass and after each, as text; for the mode FULL",
        unset="none",
    )
    fail_on_recompile: bool = setting(
        "a program that a device compiles while requests run fails their step, instead of a warning; on devices whose "
        "programs have fixed shapes",
        default=False,
    )
    level: int | None = setting(
        "how much is compiled, from 0, nothing, to 3: fills what nothing else says of mode, backend, custom_ops and "
        "compile_sizes",
        minimum=0,
        maximum=3,
        unset="as the other settings say",
    )
    compile_sizes: Sequence[int] = setting(
        "sizes of the batch that have code of their own, beside that for any size; for the mode FULL",
        default=(),
    )
    compile_ranges: Sequence[str] = setting(
        "ranges of sizes of the batch, as 2-16, that have code of their own, but for compile_sizes; for the mode FULL",
        default=(),
    )
    pass_config: Mapping[str, bool] = setting(
        "passes of opgraft, each to true or false, over their defaults; for the mode FULL",
        default={},
    )
    cache: bool | None = setting(
        "keep the code that inductor generates, for processes to come; false turns the cache off",
        unset="on, where inductor generates code and the folder can be used",
    )
    cache_folder: str | None = setting(
        "folder of that code, of this user alone",
        unset="opgraft/compiled in XDG_CACHE_HOME or ~/.cache",
    )
    cache_bytes: int = setting(
        "bytes that the folder may take; what was not used for longest goes",
        default=1 << 30,
        minimum=1,
    )
    cache_remote: str | None = setting(
        "folder that caches of machines of one kind share, a URL of fsspec or a path: what a cache has not is taken "
        "from it, and what is made is put there",
        unset="none",
    )
    cache_key: str | None = setting(
        "file of the key that signs what is in cache_remote; nothing else of it is taken",
        unset="none",
    )
    tuning_file: str | None = setting(
        "file of measurements that 'opgraft tune' writes and custom_ops auto follows",
        unset="opgraft/tuning.json in XDG_STATE_HOME or ~/.local/state",
    )
    splitting_ops: Sequence[str] | None = setting(
        "operators at which the graph is cut into pieces, as namespace::name; for the mode FULL",
        unset="attention under graph_mode piecewise, else none",
    )
    graph_mode: str | None = setting(
        "what is recorded once and replayed, on devices that can: none, the pieces between splitting_ops, or all; for "
        "the mode FULL",
        default="none",
        choices=GRAPH_MODES,
    )
    capture_sizes: Sequence[int] | None = setting(
        "sizes of the batch that are recorded, to the next of which others are padded; for a graph_mode",
        unset=f"{', '.join(map(str, CAPTURE_SIZES))} under a graph_mode",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.custom_ops is not None:
            object.__setattr__(self, "custom_ops", CustomOpsSetting.parse(self.custom_ops).tokens)
        for name, sizes in (
            ("compile_sizes", self.compile_sizes),
            ("capture_sizes", self.capture_sizes),
        ):
            if any(not 1 <= size < _MOST for size in sizes or ()):
                raise ConfigError(
                    f"compilation_config.{name} is {sizes}: use sizes of at least 1, and below {_MOST}"
                )
        _expect_apart(self.ranges)

    @property
    def ranges(self) -> tuple[range, ...]:
        """The ranges of ``compile_ranges``, ascending; the last size of each is in it."""
        return tuple(sorted(map(_range, self.compile_ranges or ()), key=lambda each: each.start))

    @property
    def cuts(self) -> tuple[str, ...]:
        """The operators at which the graph is cut."""
        if self.splitting_ops is not None:
            return tuple(self.splitting_ops)
        return ATTENTION if self.graph_mode == "piecewise" else ()

    @property
    def executed_otherwise(self) -> bool:
        """Tell whether the graph runs in pieces or from static graphs, and not as one function."""
        return bool(self.cuts or self.recorded_sizes)

    @property
    def recorded_sizes(self) -> tuple[int, ...]:
        """The sizes of the batch that static graphs are recorded for, ascending; none without a ``graph_mode``."""
        if self.graph_mode in (None, "none"):
            return ()
        return tuple(
            sorted({*(CAPTURE_SIZES if self.capture_sizes is None else self.capture_sizes)})
        )

    def expect_followed(self) -> None:
        """Refuse settings of the compiler that the mode does not use.

        Raises:
            ConfigError: one of them is set, and the mode is not ``FULL``; or sizes of graphs, and no ``graph_mode``, or
                the reverse; or the cache, and there is no code for it.
        """
        if self.capture_sizes and not self.recorded_sizes:
            raise ConfigError(
                "compilation_config.capture_sizes is set, and compilation_config.graph_mode is none: set it to "
                "piecewise or full, or leave the sizes out"
            )
        if self.graph_mode not in (None, "none") and not self.recorded_sizes:
            raise ConfigError(
                f"compilation_config.graph_mode is {self.graph_mode}, and compilation_config.capture_sizes is empty: "
                "name sizes that are to be recorded, or set the mode to none"
            )
        unused = [name for name in OF_FULL if getattr(self, name) not in (None, "none", (), {})]
        if unused and self.mode is not CompilationMode.FULL:
            raise ConfigError(
                f"compilation_config.{unused[0]} is set, and is for the mode FULL; compilation_config.mode is "
                f"{CompilationMode(self.mode or 0).name}: set it to FULL, or leave the other out"
            )
        if self.cache and not is_packaged(self.mode, self.backend):
            raise ConfigError(
                f"compilation_config.cache is set, and keeps code that one of the backends {', '.join(PACKAGED)} makes "
                "under the mode FULL or DYNAMO_TRACE_ONCE; compilation_config.backend is "
                f"{self.backend!r} and compilation_config.mode {CompilationMode(self.mode or 0).name}: set the cache "
                "to false, or the others to such"
            )


def _range(text: str) -> range:
    """Return the sizes of a range.

    Raises:
        ConfigError: it is none, or has none, or begins below 1.
    """
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*-\s*([0-9]{1,18})\s*", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first < last:
        raise ConfigError(
            f"compilation_config.compile_ranges has {text!r}: write the first and the last of two sizes or more, of at "
            "least 1, as 2-16, and a single size in compile_sizes"
        )
    return range(first, last + 1)


def _expect_apart(ranges: Sequence[range]) -> None:
    """Refuse ranges that have a size in common.

    Raises:
        ConfigError: two do.
    """
    for lower, upper in itertools.pairwise(ranges):
        if upper.start in lower:
            pair = " and ".join(f"{each.start}-{each.stop - 1}" for each in (lower, upper))
            raise ConfigError(
                f"compilation_config.compile_ranges has {pair}, which both have the size {upper.start}: leave it to one"
            )


OF_FULL = (
    "user_passes",
    "dump_graphs",
    "pass_config",
    "compile_sizes",
    "compile_ranges",
    "splitting_ops",
    "graph_mode",
)
"""Settings that only the mode ``FULL`` follows."""


@dataclass(frozen=True)
class CustomOpsSetting:
    """A parsed ``custom_ops``.

    Attributes:
        default: of ops that are not named, ``None`` where it is not stated.
        on, off: the ops that are switched by name.
        auto: whether measurements choose for the others.
    """

    tokens: tuple[str, ...]
    default: bool | None
    on: frozenset[str]
    off: frozenset[str]
    auto: bool

    @classmethod
    def parse(cls, value: Sequence[str]) -> CustomOpsSetting:
        """Parse tokens, each possibly several joined by commas.

        Raises:
            ConfigError: a token of another form, two of ``all``, ``none`` and ``auto``, or ``+x`` with ``-x``.
        """
        tokens = tuple(part.strip() for name in value for part in name.split(",") if part.strip())
        wrong = [t for t in tokens if t not in _FOR_ALL and not (t[0] in "+-" and len(t) > 1)]
        if wrong:
            raise ConfigError(
                f"custom_ops has {wrong[0]!r}: each entry is 'all', 'none', 'auto', '+op' or '-op' (got {tokens})"
            )
        rivals = [token for token in _FOR_ALL if token in tokens]
        if len(rivals) > 1:
            both = " and ".join(map(repr, rivals[:2]))
            raise ConfigError(f"custom_ops has both {both} (got {tokens}): keep one of them")
        on = frozenset(token[1:] for token in tokens if token[0] == "+")
        off = frozenset(token[1:] for token in tokens if token[0] == "-")
        if on & off:
            name = min(on & off)
            raise ConfigError(
                f"custom_ops has both '+{name}' and '-{name}' (got {tokens}): keep one of them"
            )
        default = True if "all" in tokens else False if "none" in tokens else None
        return cls(tokens, default, on, off, "auto" in tokens)

    def leaves_to_measurements(self, op: str) -> bool:
        """Tell whether measurements may choose for an op, as nobody switches it by name."""
        return self.auto and op not in self.on | self.off


_FOR_ALL = ("all", "none", "auto")
"""Entries of ``custom_ops`` that are no op's."""
