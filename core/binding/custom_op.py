"""``CustomOp``, the base of all ops, and ``PluggableLayer``, an op made of other ops.

The way from ``RMSNorm(...)`` to the kernel:

1. ``CustomOp.__new__`` calls ``bind`` of ``specialisation.py``. ``bind`` loads the plugins, chooses
   the replacement class and the kernel, and returns a ``Binding``.
2. ``__new__`` makes an instance of ``binding.specialisation``: a subclass of the chosen class, with
   the kernel as the method ``forward``.
3. Calling the instance is the ``__call__`` of ``torch.nn.Module``, which runs ``forward``. The
   call looks nothing up: ``forward`` is the kernel, inside a guard if the kernel is
   ``inference_only``, and inside a ``Shadow`` in shadow mode.

A *form* is an op as a function, such as ``opgraft.functional.rms_norm`` (``functional.py``).

A kernel may call ``super().forward_cuda(...)`` or ``super().forward(...)``. ``CustomOp`` defines
these methods, and each hands the call on to the next kernel of the dispatch chain.
"""

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
from opgraft.binding.standing import standing_for
from opgraft.errors import GraftError, MissingKernelError, RegistrationError
from opgraft.platform import DISPATCH_KEYS
from opgraft.plugins.discovery import discover
from opgraft.registry.conditions import Condition
from opgraft.registry.decision import Decision
from opgraft.registry.op_classes import location_of, reference_method
from opgraft.registry.state import host_state
from torch import nn

OpClass = TypeVar("OpClass", bound=type)

_STANDS_FOR = "_stands_for"


class _ReplacementsByName(Mapping[str, type]):
    """Target class name → the active replacement of highest priority, on any platform."""

    def _by_name(self) -> dict[str, type]:
        # The highest priority comes last, and so stays in the dictionary.
        rows = sorted(host_state().active, key=lambda replacement: replacement.priority)
        by_name = {}
        for replacement in rows:
            target = replacement.target
            name = target.__name__ if target else replacement.asked_for
            by_name[name] = replacement.cls
        return by_name

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


class CustomOp(Replaceable, nn.Module):
    """An op with a method ``forward_<key>`` per dispatch key; construction binds the best one.

    A subclass defines ``forward_native`` in plain PyTorch, and any of ``forward_cpu``,
    ``forward_cuda``, ``forward_hip``, ``forward_xpu`` and ``forward_tpu``. A replacement may define
    ``forward_oot``. Calling the method of a key without a definition calls the next method in the
    platform's dispatch chain.

    If an active plugin replaces the class, construction returns an instance of the replacement.
    """

    __op_base__ = True
    __specialisation__ = False
    op_class: ClassVar[type]
    """The class of an instance without the specialisation. Compare classes by this attribute."""
    switchable: ClassVar[bool] = True
    """``custom_ops`` can disable the op. If ``False``, the op is always enabled."""
    repeatable: ClassVar[bool] = True
    """A call changes nothing but arguments, so shadow mode may run the op again on copies."""
    _helpers: ClassVar[tuple[str, ...]] = ()
    """The methods that ``forward_native`` computes with. A replacement may override one alone."""
    # Set by __init_subclass__.
    _overrides_helpers: ClassVar[bool] = False
    """The class overrides one of the ``_helpers`` and brings no functions for forms."""
    op_registry: ClassVar[Mapping[str, type]] = _OpsByName()
    op_registry_oot: ClassVar[Mapping[str, type]] = _ReplacementsByName()
    __continuations__: ClassVar[Mapping[str, str | None]] = {}
    """Method of this base class → the method to call instead. Each specialisation has a table."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        derive_kernels(cls)
        cls._overrides_helpers = _is_helper_overridden(cls)
        # A specialisation has the op_class of the class below.
        if "op_class" not in vars(cls) and not cls.__specialisation__:
            cls.op_class = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A replica, a copy, or a class that torch derives: the kernel is bound already.
        if cls.__specialisation__:
            return nn.Module.__new__(cls)
        binding = bind(cls)
        # The specialisation is a subclass, so Python calls the constructor of the op next.
        op: CustomOp = nn.Module.__new__(binding.specialisation)
        # Not by setattr: a class may override that, and no constructor has run yet.
        op.__dict__["_binding"] = binding
        return op

    def __init__(
        self, *args: Any, enforce_enable: bool = False, compile_native: bool = False, **kwargs: Any
    ) -> None:
        """Construct the op; ``__new__`` has bound the kernel.

        Args:
            *args: arguments for the next base class, such as ``torch.nn.Linear``.
            enforce_enable: enable this instance whatever ``custom_ops`` says.
            compile_native: not used. vLLM's constructors pass this argument on.
            **kwargs: keyword arguments for the next base class.
        """
        super().__init__(*args, **kwargs)
        if enforce_enable:
            self._adopt(enforced(self.binding))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Keep the binding in copies. Unpickling an op binds the same class anew."""
        reduced = super().__reduce_ex__(protocol)
        # torch has derived the class, such as by a parametrization, and restores it.
        if type(self) is not self.bound_class:
            return reduced
        return (_restore, (self.binding, self.__dict__.get(_STANDS_FOR)), *reduced[2:])

    def __prepare_scriptable__(self) -> Any:
        """Refuse ``torch.jit.script``, which calls this method of each module."""
        raise GraftError(
            f"torch.jit.script cannot compile the op {self.op_class.__qualname__}, which binds its "
            "kernel in Python: opgraft.ungraft(model) first, or use torch.jit.trace, torch.export "
            "or torch.compile"
        )

    def _adopt(self, binding: Binding) -> None:
        # Parameters, buffers and hooks stay: only the class says what a call runs.
        self.__dict__["_binding"] = binding
        self.__class__ = self.bound_class

    def _stand_for(self, module_class: type[nn.Module]) -> None:
        """Let ``isinstance`` find this op by the class of the module that the op replaces."""
        self.__dict__[_STANDS_FOR] = module_class
        self.__class__ = self.bound_class

    @property
    def bound_class(self) -> type:
        """The class that the binding gives this op. Another class comes from other code."""
        own: type = standing_for(self.binding.specialisation, self.__dict__.get(_STANDS_FOR))
        return own

    @property
    def binding(self) -> Binding:
        """The chosen class and kernel of this op, with the record of both choices."""
        return without_drift(self.__dict__["_binding"])

    @property
    def decision(self) -> Decision:
        """The choice of this op's kernel: candidates, providers, and the setting to change it."""
        return self.binding.decision

    @classmethod
    def enabled(cls) -> bool:
        """Return True if ``custom_ops`` enables an instance that is constructed now."""
        if not cls.switchable:
            return True
        state = host_state()
        name = op_name_of(cls, state)
        settings, _ = follow(cls, name, state.settings(), state.active)
        is_enabled, _ = settings.enabled(name)
        return is_enabled

    @staticmethod
    def default_on() -> bool:
        """Return True if an op is enabled now without a word about the op in ``custom_ops``."""
        is_enabled, _ = host_state().settings().enabled(None)
        return is_enabled

    @classmethod
    def register(
        cls, name: str, dynamic_arg_dims: Mapping[str, int | Sequence[int]] | None = None
    ) -> Callable[[OpClass], OpClass]:
        """Return a class decorator that registers an op under ``name``.

        Settings and plugins call the op by the name: ``custom_ops=["-rms_norm"]``.

        Args:
            name: the op's name.
            dynamic_arg_dims: not used. vLLM's compiler keeps other dimensions constant.

        Raises:
            RegistrationError: the class is no ``CustomOp``, or has neither ``forward_native`` nor
                ``forward``.
            ConflictError: another class holds the name.
        """

        # Without parentheses the decorator is given the class for a name.
        if not isinstance(name, str) or not name.isidentifier():
            raise RegistrationError(
                "an op is registered by a name such as 'rms_norm', @CustomOp.register('name'): "
                f"{name!r}"
            )

        def decorate(op_class: OpClass) -> OpClass:
            if not (isinstance(op_class, type) and issubclass(op_class, CustomOp)):
                raise RegistrationError(
                    f"{op_class!r} is registered as op {name!r} but is no subclass of "
                    "opgraft.CustomOp"
                )
            if reference_method(op_class) is None:
                place = location_of(op_class)
                raise RegistrationError(
                    f"op {name!r}, {op_class.__qualname__} at {place}, defines neither "
                    "forward_native nor forward: without one it could not run where no plugin "
                    "serves it"
                )
            state = host_state()
            provider = discover().provider_of(op_class.__module__)
            # If the plugin fails to load, the undo of add takes the name back.
            add = partial(state.registry.add_op, name, op_class, provider)
            state.declare(f"op {name}", provider, add)
            return op_class

        return decorate

    def _call_next(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        continuation = self.__continuations__[method]
        if continuation is None:
            raise MissingKernelError(
                f"{self.op_class.__qualname__} at {location_of(self.op_class)} has no {method}, "
                f"nor a kernel further along the dispatch chain {self.binding.kernel.chain}: "
                f"define {method} or forward_native"
            )
        return getattr(self, continuation)(*args, **kwargs)

    # A call comes to the methods below from super(), or for a key without a definition: the
    # specialisation defines forward, and op classes define forward_<key>. The op class's forward,
    # which the specialisation hides, is the last continuation.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the most derived kernel of the platform's chain.

        A replacement's ``super().forward(...)`` ends here.
        """
        return self._call_next("forward", args, kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op in plain PyTorch, on any platform."""
        return self._call_next("forward_native", args, kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on CPUs."""
        return self._call_next("forward_cpu", args, kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op on CUDA devices, and on any platform with ``cuda`` in the chain."""
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
        """Compute the op by the kernel of a replacement, the first key of every chain."""
        return self._call_next("forward_oot", args, kwargs)


def _is_helper_overridden(cls: type[CustomOp]) -> bool:
    """Return True if a class overrides one of the ``_helpers`` and brings no functions for forms.

    The most derived class with a helper or a function decides.
    """
    functions = {f"functional_{key}" for key in DISPATCH_KEYS}
    for base in cls.__mro__:
        own = vars(base).keys()
        if "_helpers" in own or not functions.isdisjoint(own):
            return False
        if not own.isdisjoint(cls._helpers):
            return True
    return False


class PluggableLayer(CustomOp):
    """An op made of other ops. A plugin replaces the layer as a whole.

    The layer defines ``forward``, and ``custom_ops`` cannot disable that method. A replacement may
    add ``forward_<key>`` methods. These take part in the choice, and ``custom_ops`` can disable
    them.
    """

    __op_base__ = True
    repeatable: ClassVar[bool] = False
    called: ClassVar[bool] = True
    """A model calls the layer. ``False`` if another layer computes with this layer's weight."""

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
        """Register as ``CustomOp.register_oot`` does.

        ``_decorated_layer_cls`` is vLLM's name for the replacement class.
        """
        replacement = _decorated_layer_cls or _decorated_op_cls
        return super().register_oot(replacement, name, priority=priority, when=when)

    def idle(self) -> frozenset[str]:
        """Return the names of the children that a call does not run now, without gradients.

        If an ``AttentionBatch`` is set, the call is one with the batch. A replacement that calls
        other children overrides ``idle``. Without an override, tables leave out each child that
        the replacement's code does not name.
        """
        return frozenset()

    def computed_at_once(self) -> tuple[str, ...]:
        """Return the names of the children that one op computes, if no gradient is required."""
        return ()

    def forms(self) -> Sequence[Functional[..., Any]]:
        """Return the functional forms that a call of this layer runs beside the children.

        Each form has a kernel of its own.
        """
        return ()


def maybe_get_oot_by_class(cls: type) -> type:
    """Return the class of an instance that ``cls(...)`` constructs now.

    That is the active replacement, or ``cls`` itself.
    """
    return bind(cls).replacement.cls if issubclass(cls, CustomOp) else cls


def _restore(binding: Binding, module_class: type | None = None) -> CustomOp:
    op: CustomOp = nn.Module.__new__(standing_for(binding.specialisation, module_class))
    op.__dict__["_binding"] = binding
    return op
