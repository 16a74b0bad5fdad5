"""The settings of compilation and of enabled ops."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from opgraft.config.declaration import KINDS, Section, SettingType, setting
from opgraft.errors import ConfigError


class CompilationMode(enum.IntEnum):
    """The way to compile a model under this config, with vLLM's names and numbers.

    ``NONE``: not at all. ``STOCK_TORCH_COMPILE``: by ``torch.compile``. ``DYNAMO_TRACE_ONCE``: by
    one trace of Dynamo, without guards. ``FULL``: by opgraft's own passes and pieces; vLLM's name
    is ``VLLM_COMPILE``. ``TORCH_COMPILE`` is the older name of ``STOCK_TORCH_COMPILE``. With all
    modes but ``NONE`` and the backend ``inductor``, custom ops default to ``none``.
    """

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    FULL = 3
    TORCH_COMPILE = 1
    VLLM_COMPILE = 3


def _mode(value: Any) -> Any:
    """Return the mode of a name or number. Other values stay, and the check of types fails."""
    names = CompilationMode.__members__
    # Compared as text: True is an integer in Python, and would be the mode 1.
    text = str(value)
    if isinstance(value, str) and text.upper() in names:
        return names[text.upper()]
    # One digit: int() takes spaces and digits of other scripts, too.
    if re.fullmatch("[0-9]", text) and int(text) in tuple(CompilationMode):
        return CompilationMode(int(text))
    return value


_MODES = f"one of {', '.join(CompilationMode.__members__)} or a number from 0 to 3"
KINDS["CompilationMode"] = SettingType(
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
"""By level, values for settings of a ``CompilationConfig`` without another value.

Level 1 generates no code, so it starts soon. At higher levels, linear layers keep the kernel for
packed weights."""

GRAPH_MODES = ("none", "piecewise", "full")
"""The recorded parts of a call: none, each piece between ``splitting_ops``, or the whole."""

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
"""A number of rows above that of any batch."""

PACKAGED = ("inductor",)
"""Backends with code for files."""

DEFAULT_LEVEL = 2
"""The level of ``opgraft.compile`` without a setting."""


def is_packaged(mode: CompilationMode | None, backend: str | None) -> bool:
    """Return True if mode and backend make code for the cache."""
    return mode in (CompilationMode.FULL, CompilationMode.DYNAMO_TRACE_ONCE) and backend in PACKAGED


@dataclass(frozen=True)
class CompilationConfig(Section):
    """The settings of compilation and of enabled ops.

    Attributes:
        custom_ops: ``all``, ``none`` or ``auto`` (one at most), ``+op``, ``-op``. An op is named
            by registered name or by class: ``-rms_norm`` or ``-RMSNorm``. A text may hold several:
            ``["none,+a"]`` is ``["none", "+a"]``. Without ``all`` and ``none``, the default is
            ``none`` if ``backend`` is ``inductor`` and ``mode`` is not ``NONE``, else ``all``.
            Under ``auto``, an enabled op runs the fastest measured kernel.
        backend: the name of a ``torch.compile`` backend.
        mode: a ``CompilationMode``, a name or a number.
        user_passes: passes after opgraft's own, each as ``module:Class``, as a subclass of
            ``GraphPass``, or as an object. Only for the mode ``FULL``.
        dump_graphs: a folder for the graph before the first pass and after each. Only for ``FULL``.
        fail_on_recompile: a request must not compile a program. For devices with programs of fixed
            shapes, all compiled before the first request.
        level: from 0 (compile nothing) to 3. Fills fields without a value by ``LEVELS``.
        compile_sizes: sizes of the batch with separate code. Only for ``FULL``.
        compile_ranges: ranges of sizes with separate code, such as ``"2-16"``. Only for ``FULL``.
        pass_config: pass of opgraft → ``True`` to run the pass. Only for ``FULL``.
        cache: False keeps no generated code. True requires the cache: a folder that cannot be
            used, or a mode without code to keep, is an error. By default the cache is on if there
            is code.
        cache_folder: the folder of the cache.
        cache_bytes: the largest number of bytes in the cache.
        cache_remote: a folder of fsspec, or a path, with entries for several machines.
        cache_key: the file of the key for signatures in ``cache_remote``.
        tuning_file: the measurements of ``opgraft tune`` on this machine, for ``auto``.
        splitting_ops: operators to cut the graph at, as ``namespace::name``. The default for the
            ``graph_mode`` ``piecewise`` is ``ATTENTION``. The operators run outside of compiled
            code.
        graph_mode: one of ``GRAPH_MODES``.
        capture_sizes: sizes of the batch with a static graph. A call is padded to the next size.
    """

    section: ClassVar[str] = "compilation_config"

    custom_ops: Sequence[str] | None = setting(
        "enabled ops: all, none, or auto for the kernels that were measured to be best; +op and "
        "-op switch one op, by its name or class, such as -rms_norm or -RMSNorm",
        default=(),
        variable="OPGRAFT_CUSTOM_OPS",
    )
    backend: str | None = setting("the torch.compile backend for models", default="inductor")
    mode: CompilationMode | None = setting("how models are compiled", default=CompilationMode.NONE)
    user_passes: Sequence[Any] = setting(
        "passes over the graph after opgraft's own, as module:Class, or in Python a class or an "
        "object; for the mode FULL",
        default=(),
    )
    dump_graphs: str | None = setting(
        "folder for the graph before the first pass and after each, as text; for the mode FULL",
        unset="none",
    )
    fail_on_recompile: bool = setting(
        "fail a step, instead of a warning, if the device compiles a program while requests run;"
        " on devices whose programs have fixed shapes",
        default=False,
    )
    level: int | None = setting(
        "how much is compiled, from 0 (nothing) to 3: sets mode, backend, custom_ops and "
        "compile_sizes if nothing else does",
        minimum=0,
        maximum=3,
        unset="as the other settings say",
    )
    compile_sizes: Sequence[int] = setting(
        "batch sizes with their own code, beside the code for any size; for the mode FULL",
        default=(),
    )
    compile_ranges: Sequence[str] = setting(
        "ranges of batch sizes with their own code, such as 2-16, except compile_sizes; for the "
        "mode FULL",
        default=(),
    )
    pass_config: Mapping[str, bool] = setting(
        "opgraft's passes by name, each true or false instead of the default; for the mode FULL",
        default={},
    )
    cache: bool | None = setting(
        "keep code generated by inductor for later processes; false turns the cache off",
        unset="on, if inductor generates code and the folder can be used",
    )
    cache_folder: str | None = setting(
        "folder of this code, for this user only",
        unset="opgraft/compiled in XDG_CACHE_HOME or ~/.cache",
    )
    cache_bytes: int = setting(
        "bytes of the folder, at most; the code unused for longest is removed first",
        default=1 << 30,
        minimum=1,
    )
    cache_remote: str | None = setting(
        "folder that caches of machines of one kind share, a URL of fsspec or a path: missing "
        "code is read from the folder, and new code is written to it",
        unset="none",
    )
    cache_key: str | None = setting(
        "file of the key that signs the code in cache_remote; code with another signature is not"
        " read",
        unset="none",
    )
    tuning_file: str | None = setting(
        "file of measurements, written by 'opgraft tune' and read by custom_ops auto",
        unset="opgraft/tuning.json in XDG_STATE_HOME or ~/.local/state",
    )
    splitting_ops: Sequence[str] | None = setting(
        "operators at which the graph is cut into pieces, as namespace::name; for the mode FULL",
        unset="attention under graph_mode piecewise, else none",
    )
    graph_mode: str | None = setting(
        "part of the graph to record once and replay, on devices that can: none, the pieces "
        "between splitting_ops, or all; for the mode FULL",
        default="none",
        choices=GRAPH_MODES,
    )
    capture_sizes: Sequence[int] | None = setting(
        "batch sizes to record; other batches are padded to the next size; for a graph_mode",
        unset=f"{', '.join(map(str, CAPTURE_SIZES))} under a graph_mode",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.custom_ops is not None:
            # Two spellings of one list, such as ["a,b"] and ["a", "b"], must be equal settings.
            tokens = CustomOpsSetting.parse(self.custom_ops).tokens
            object.__setattr__(self, "custom_ops", tokens)
        _expect_sizes("compile_sizes", self.compile_sizes)
        _expect_sizes("capture_sizes", self.capture_sizes)
        _expect_apart(self.ranges)

    @property
    def ranges(self) -> tuple[range, ...]:
        """The ranges of ``compile_ranges``, ascending, with the last size of each."""
        ranges = [_range(text) for text in self.compile_ranges or ()]
        # Ascending, so that a comparison of neighbours finds every overlap.
        ranges.sort(key=lambda each: each.start)
        return tuple(ranges)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The operators to cut the graph at."""
        # An empty list is a choice, too: pieces without a cut.
        if self.splitting_ops is not None:
            return tuple(self.splitting_ops)
        return ATTENTION if self.graph_mode == "piecewise" else ()

    @property
    def executed_otherwise(self) -> bool:
        """True if the graph runs in pieces or from static graphs, and not as one function."""
        return bool(self.cuts or self.recorded_sizes)

    @property
    def recorded_sizes(self) -> tuple[int, ...]:
        """The sizes of the batch with static graphs, ascending; none without a ``graph_mode``."""
        if self.graph_mode in (None, "none"):
            return ()
        sizes = CAPTURE_SIZES if self.capture_sizes is None else self.capture_sizes
        return tuple(sorted(set(sizes)))

    def expect_followed(self) -> None:
        """Check that the mode uses all settings of the compiler.

        Raises:
            ConfigError: a setting for ``FULL`` is set under another mode; or sizes are set without
                a ``graph_mode``, or the reverse; or the cache is on, and there is no code for it.
        """
        self._expect_graph_mode_with_sizes()
        # These four values are the defaults, which change nothing in any mode.
        of_full = [name for name in OF_FULL if getattr(self, name) not in (None, "none", (), {})]
        if of_full and self.mode is not CompilationMode.FULL:
            raise ConfigError(
                f"compilation_config.{of_full[0]} is set, and is for the mode FULL; "
                f"compilation_config.mode is {CompilationMode(self.mode or 0).name}: set it to "
                "FULL, as -O1, -O2 and -O3 do, or leave the other out"
            )
        if self.cache and not is_packaged(self.mode, self.backend):
            raise ConfigError(
                "compilation_config.cache is set, and keeps code that one of the backends "
                f"{', '.join(PACKAGED)} makes under the mode FULL or DYNAMO_TRACE_ONCE; "
                f"compilation_config.backend is {self.backend!r} and compilation_config.mode "
                f"{CompilationMode(self.mode or 0).name}: set the cache to false, or the others to "
                "such"
            )

    def _expect_graph_mode_with_sizes(self) -> None:
        """Check that sizes and ``graph_mode`` are set together.

        Raises:
            ConfigError: one of them is set without the other.
        """
        if self.capture_sizes and not self.recorded_sizes:
            raise ConfigError(
                "compilation_config.capture_sizes is set, and compilation_config.graph_mode is "
                "none: set it to piecewise or full, or leave the sizes out"
            )
        if self.graph_mode not in (None, "none") and not self.recorded_sizes:
            raise ConfigError(
                f"compilation_config.graph_mode is {self.graph_mode}, and "
                "compilation_config.capture_sizes is empty: name sizes that are to be recorded, "
                "or set the mode to none"
            )


def _expect_sizes(name: str, sizes: Sequence[int] | None) -> None:
    """Check the sizes of a setting.

    Raises:
        ConfigError: a size is below 1, or too large for a batch.
    """
    if any(not 1 <= size < _MOST for size in sizes or ()):
        raise ConfigError(
            f"compilation_config.{name} is {sizes}: use sizes of at least 1, and below {_MOST}"
        )


def _range(text: str) -> range:
    """Return the sizes of a range.

    Raises:
        ConfigError: the text is no range, or has fewer than two sizes, or begins below 1.
    """
    # At most 18 digits: Python refuses to read numbers of more than 4,300 digits.
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*-\s*([0-9]{1,18})\s*", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first < last:
        raise ConfigError(
            f"compilation_config.compile_ranges has {text!r}: write the first and the last of two "
            "sizes or more, of at least 1, as 2-16, and a single size in compile_sizes"
        )
    return range(first, last + 1)


def _expect_apart(ranges: Sequence[range]) -> None:
    """Check that ranges have no size in common.

    Raises:
        ConfigError: two ranges have a size in common.
    """
    for lower, upper in itertools.pairwise(ranges):
        if upper.start in lower:
            pair = " and ".join(f"{each.start}-{each.stop - 1}" for each in (lower, upper))
            raise ConfigError(
                f"compilation_config.compile_ranges has {pair}, which both have the size "
                f"{upper.start}: leave it to one"
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
        tokens: the entries of the setting.
        default: for ops without an entry: enabled or not; ``None`` without ``all`` and ``none``.
        on, off: the names in entries ``+op`` and ``-op``: registered names of ops, or names of
            their classes before ``with_op_names``.
        auto: measurements choose for all other ops.
    """

    tokens: tuple[str, ...]
    default: bool | None
    on: frozenset[str]
    off: frozenset[str]
    auto: bool

    @classmethod
    def parse(cls, value: Sequence[str]) -> CustomOpsSetting:
        """Parse tokens. A text may hold several tokens, joined by commas.

        Raises:
            ConfigError: a token has another form, or two tokens contradict each other.
        """
        tokens = _tokens(value)
        given = [token for token in _FOR_ALL if token in tokens]
        if len(given) > 1:
            both = " and ".join(map(repr, given[:2]))
            raise ConfigError(f"custom_ops has both {both} (got {tokens}): keep one of them")
        on = frozenset(token[1:] for token in tokens if token[0] == "+")
        off = frozenset(token[1:] for token in tokens if token[0] == "-")
        for name in sorted(on & off):
            raise ConfigError(
                f"custom_ops has both '+{name}' and '-{name}' (got {tokens}): keep one of them"
            )
        default = _DEFAULTS.get(given[0]) if given else None
        return cls(tokens, default, on, off, "auto" in tokens)

    def with_op_names(self, names: Mapping[str, str], origin: str) -> tuple[str, ...]:
        """Return the entries with registered names of ops in place of names of classes.

        Example: with the names ``{"RMSNorm": "rms_norm"}``, ``-RMSNorm`` becomes ``-rms_norm``.

        Args:
            names: the name of a class → the registered name of its op.
            origin: the origin of the setting, for the message.

        Raises:
            ConfigError: two entries contradict each other, since they name one op.
        """
        spellings: dict[str, str] = {}
        for token in self.tokens:
            if token in _FOR_ALL:
                spellings[token] = token
                continue
            sign = token[0]
            # A name that is no class stays: an op of a plugin may be registered later.
            name = names.get(token[1:], token[1:])
            opposite = spellings.get(_OPPOSITE[sign] + name)
            if opposite is not None:
                raise ConfigError(
                    f"custom_ops has both {opposite!r} and {token!r} ({origin}), and both name "
                    f"the op {name!r}: keep one of them"
                )
            spellings[sign + name] = token
        return tuple(spellings)

    def leaves_to_measurements(self, op: str) -> bool:
        """Return True if measurements may choose for an op: no entry names the op."""
        return self.auto and op not in self.on | self.off


def _tokens(value: Sequence[str]) -> tuple[str, ...]:
    """Return the tokens of texts, which may hold several, joined by commas.

    Raises:
        ConfigError: a token has another form than ``all``, ``none``, ``auto``, ``+op`` and ``-op``.
    """
    parts = [part.strip() for text in value for part in text.split(",")]
    tokens = tuple(part for part in parts if part)
    for token in tokens:
        is_of_op = token[0] in "+-" and len(token) > 1
        if token not in _FOR_ALL and not is_of_op:
            raise ConfigError(
                f"custom_ops has {token!r}: each entry is 'all', 'none', 'auto', '+op' or "
                f"'-op' (got {tokens})"
            )
    return tokens


_FOR_ALL = ("all", "none", "auto")
"""Entries of ``custom_ops`` for all ops."""

_OPPOSITE = {"+": "-", "-": "+"}
"""Each sign of an entry with the sign that contradicts it."""

_DEFAULTS = {"all": True, "none": False}
"""The entries that say whether other ops are enabled."""
