"""``CustomOp``, the base of all ops, and ``PluggableLayer``, an op made of other ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from opgraft.binding.declaring import Replaceable
from opgraft.binding.derivation import derive_kernels
from opgraft.binding.functional import Functional
from opgraft.binding.measurements import follow
from opgraft.binding.names import op_name_of
from opgraft.binding.specialisation import Binding, bind, enforced, without_drift
from opgraft.errors import GraftError, MissingKernelError, RegistrationError
from opgraft.platform import DISPATCH_KEYS
from opgraft.plugins.discovery import discover
from opgraft.registry.conditions import Condition
from opgraft.registry.decision import Decision
from opgraft.registry.op_classes import location_of, reference_method
from opgraft.registry.state import host_state
from torch import nn

OpClass = TypeVar("OpClass", bound=type)


class _ReplacementsByName(Mapping[str, type]):
    """Target class name → the active replacement of highest priority, whether or not it applies on this platform."""

    def _by_name(self) -> dict[str, type]:
        rows = sorted(host_state().active, key=lambda replacement: replacement.priority)
        return {(r.target.__name__ if r.target else r.asked_for): r.cls for r in rows}

    def __getitem__(self, name: str) -> type:
        return self._by_name()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._by_name())

    def __repr__(self) -> str:
        return repr(self._by_name())


class _OpsByName(Mapping[str, type]):
    """Registered op name → op class."""

    def __getitem__(self, name: str) -> type:
        return host_state().registry.ops[name].cls

    def __iter__(self) -> Iterator[str]:
        return iter(host_state().registry.ops)

    def __len__(self) -> int:
        return len(host_state().registry.ops)

    def __repr__(self) -> str:
        return repr(dict(self))


def _overrides_helpers(cls: type[CustomOp]) -> bool:
    """Return True if a class overrides one of the ``_helpers`` and brings no functions for forms.

    Of two base classes the more derived one decides.
    """
    functions = {f"functional_{key}" for key in DISPATCH_KEYS}
    for base in cls.__mro__:
        own = vars(base).keys()
        if "_helpers" in own or not functions.isdisjoint(own):
            return False
        if not own.isdisjoint(cls._helpers):
            return True
    return False


class CustomOp(Replaceable, nn.Module):
    """An op with one ``forward_<key>`` method per dispatch key, of which construction binds the best as ``forward``.

    A subclass defines ``forward_native`` in plain PyTorch and any of ``forward_cpu``, ``forward_cuda``,
    ``forward_hip``, ``forward_xpu``, ``forward_tpu`` and, in replacements, ``forward_oot``. Where a key is not defined,
    calling its method calls the next one in the platform's dispatch chain.

    Constructing a class that an active plugin replaces returns an instance of the replacement.
    """

    __op_base__ = True
    __specialisation__ = False
    op_class: ClassVar[type]
    """The class of an instance without its specialisation; use it where the exact class matters."""
    switchable: ClassVar[bool] = True
    """The switch of ``custom_ops`` for this op; ``False``: it is always enabled."""
    repeatable: ClassVar[bool] = True
    """A call changes nothing but its arguments, so that shadow mode may run it twice, the second time on copies."""
    _helpers: ClassVar[tuple[str, ...]] = ()
    """The methods that ``forward_native`` may compute by, for a replacement to override one of those alone."""
    _overrides_helpers: ClassVar[bool] = False
    """A replacement overrides one of the ``_helpers`` and brings no functions for forms."""
    op_registry: ClassVar[Mapping[str, type]] = _OpsByName()
    op_registry_oot: ClassVar[Mapping[str, type]] = _ReplacementsByName()
    __continuations__: ClassVar[Mapping[str, str | None]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        derive_kernels(cls)
        cls._overrides_helpers = _overrides_helpers(cls)
        if "op_class" not in vars(cls) and not cls.__specialisation__:
            cls.op_class = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Replicas, copies and classes that torch derives from a specialisation.
        if cls.__specialisation__:
            return nn.Module.__new__(cls)
        binding = bind(cls)
        op: CustomOp = nn.Module.__new__(binding.specialisation)
        op.__dict__["_binding"] = binding
        return op

    def __init__(
        self, *args: Any, enforce_enable: bool = False, compile_native: bool = False, **kwargs: Any
    ) -> None:
        """Bind the op.

        Args:
            *args: of the module that an op stands in for, such as ``torch.nn.Linear``.
            enforce_enable: enable this instance whatever ``custom_ops`` says.
            compile_native: not read; vLLM's own compiler does.
            **kwargs: as ``args``.
        """
        super().__init__(*args, **kwargs)
        if enforce_enable:
            self._adopt(enforced(self.binding))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Keep the binding in copies; bind an op that is unpickled anew, as the same class."""
        reduced = super().__reduce_ex__(protocol)
        if type(self) is not self.binding.specialisation:
            return reduced
        return (_restore, (self.binding,), *reduced[2:])

    def __prepare_scriptable__(self) -> Any:
        """Say to ``torch.jit.script``, which asks each module, that an op is none of what it can compile."""
        raise GraftError(
            f"torch.jit.script cannot compile the op {self.op_class.__qualname__}, which binds its kernel in Python: "
            "opgraft.ungraft(model) first, or use torch.jit.trace, torch.export or torch.compile"
        )

    def _adopt(self, binding: Binding) -> None:
        self.__dict__["_binding"] = binding
        self.__class__ = binding.specialisation

    @property
    def binding(self) -> Binding:
        """The class and the kernel that were chosen for this op, with the record of both choices."""
        return without_drift(self.__dict__["_binding"])

    @property
    def decision(self) -> Decision:
        """Explain which kernel this op runs: candidates, providers, and the settings that would change it."""
        return self.binding.decision

    @classmethod
    def enabled(cls) -> bool:
        """Return whether an instance constructed now would be enabled by ``custom_ops``."""
        state = host_state()
        name = op_name_of(cls, state)
        return (
            not cls.switchable
            or follow(cls, name, state.settings(), state.active)[0].enabled(name)[0]
        )

    @staticmethod
    def default_on() -> bool:
        """Return whether an op that ``custom_ops`` does not name would be enabled here and now."""
        return host_state().settings().enabled(None)[0]

    @classmethod
    def register(
        cls, name: str, dynamic_arg_dims: Mapping[str, int | Sequence[int]] | None = None
    ) -> Callable[[OpClass], OpClass]:
        """Make an op known under ``name``, by which settings and plugins call it; a class decorator.

        Args:
            name: the op's name.
            dynamic_arg_dims: not read; vLLM's own compiler does, to keep the other dimensions of arguments constant.

        Raises:
            RegistrationError: not a ``CustomOp``, or without ``forward_native`` and ``forward``.
            ConflictError: another class holds the name.
        """

        # Without parentheses the decorator is given the class for a name.
        if not isinstance(name, str) or not name.isidentifier():
            raise RegistrationError(
                f"an op is registered by a name such as 'rms_norm', @CustomOp.register('name'): {name!r}"
            )

        def decorate(op_class: OpClass) -> OpClass:
            if not (isinstance(op_class, type) and issubclass(op_class, CustomOp)):
                raise RegistrationError(
                    f"{op_class!r} is registered as op {name!r} but is no subclass of opgraft.CustomOp"
                )
            if reference_method(op_class) is None:
                raise RegistrationError(
                    f"op {name!r}, {op_class.__qualname__} at {location_of(op_class)}, defines neither forward_native "
                    "nor forward: without one it could not run where no plugin serves it"
                )
            state, provider = host_state(), discover().provider_of(op_class.__module__)
            add = partial(state.registry.add_op, name, op_class, provider)
            state.declare(f"op {name}", provider, add)
            return op_class

        return decorate

    def _call_next(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        further = self.__continuations__[method]
        if further is None:
            raise MissingKernelError(
                f"{self.op_class.__qualname__} at {location_of(self.op_class)} has no {method}, nor a kernel further "
                f"along the dispatch chain {self.binding.kernel.chain}: define {method} or forward_native"
            )
        return getattr(self, further)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the most derived kernel of the platform's chain: a replacement's ``super().forward(...)`` ends here."""
        return self._call_next("forward", args, kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op in plain PyTorch, which every platform can run."""
        return self._call_next("forward_native", args, kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on CPUs."""
        return self._call_next("forward_cpu", args, kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on CUDA devices, and on those whose platform has ``cuda`` in its chain."""
        return self._call_next("forward_cuda", args, kwargs)

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on ROCm devices."""
        return self._call_next("forward_hip", args, kwargs)

    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on Intel GPUs."""
        return self._call_next("forward_xpu", args, kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on TPUs."""
        return self._call_next("forward_tpu", args, kwargs)

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op by the kernel that a replacement brings; it stands first in every chain."""
        return self._call_next("forward_oot", args, kwargs)


class PluggableLayer(CustomOp):
    """An op made of other ops: it defines ``forward`` itself, which is not switched, and is replaced as a whole.

    A replacement may add ``forward_<key>`` methods, which then count like anyone's; ``custom_ops`` switches those.
    """

    __op_base__ = True
    repeatable: ClassVar[bool] = False
    called: ClassVar[bool] = True
    """A model calls such a layer; ``False`` for one with whose weight another layer computes."""

    @classmethod
    def register_oot(
        cls,
        _decorated_op_cls: type | str | None = None,
        name: str | type | None = None,
        *,
        priority: int = 0,
        when: Condition | None = None,
        _decorated_layer_cls: type | None = None,
    ) -> Any:
        """Register as ``CustomOp.register_oot`` does; vLLM calls the class here ``_decorated_layer_cls``."""
        replacement = _decorated_layer_cls or _decorated_op_cls
        return super().register_oot(replacement, name, priority=priority, when=when)

    def idle(self) -> frozenset[str]:
        """Return the names of the children that a call does not run as things are, if no gradient is required.

        If an ``AttentionBatch`` is set, the call is one with the batch. A replacement that calls other children
        overrides this. If a replacement does not, tables leave out the children that its code does not name.
        """
        return frozenset()

    def forms(self) -> Sequence[Functional[..., Any]]:
        """Return the functional forms that a call runs by itself, each of which has a kernel of its own."""
        return ()


def maybe_get_oot_by_class(cls: type) -> type:
    """Return the class that constructing ``cls`` here and now yields: its active replacement, or ``cls`` itself."""
    return bind(cls).replacement.cls if issubclass(cls, CustomOp) else cls


def _restore(binding: Binding) -> CustomOp:
    op: CustomOp = nn.Module.__new__(binding.specialisation)
    op.__dict__["_binding"] = binding
    return op
