"""The gated feed-forward layer of decoder models."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.marks import falls_back
from opgraft.ops.activation.modules import GeluAndMul, SiluAndMul
from opgraft.ops.checks import expect_choice
from opgraft.ops.composites.composite import epilogue_of, is_observed, may_stand_for
from opgraft.ops.composites.joint import JointLayer
from opgraft.ops.linear import functional
from opgraft.ops.linear.modules import Linear
from torch import Tensor, nn

__all__ = ["GatedMLP"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@CustomOp.register("gated_mlp")
class GatedMLP(JointLayer):
    """``down(act(gate(x)) · up(x))``, with one linear op for gate and up.

    Source: Shazeer, arXiv:2002.05202. In memory, the weights of gate and up are one matrix,
    ``[2 · intermediate_size, hidden_size]``; the parameters, their names, values and storages are
    those of two layers. The gated activation op takes the joint product. In three cases, gate, up,
    ``act`` and the product follow one by one:

    - gate and up must be called by themselves, see ``JointLayer.joint_op``,
    - ``act`` has hooks,
    - ``act`` has a kernel from a provider without one for the gated activation, see
      ``may_stand_for``.

    Args:
        hidden_size: elements of the last dimension of input and output.
        intermediate_size: elements between the products.
        activation: ``"silu"``, ``"gelu"`` (exact) or ``"gelu_tanh"``.
        bias: gate and up have a bias.
        down_bias: down has a bias.
        names: the names of gate, up and down, and of ``act`` if given.
        act: the activation, for a model with a layer for it; torch's function by default.

    Shapes:
        ``[..., hidden_size]`` to ``[..., hidden_size]``, any floating-point dtype.

    Raises:
        ValueError: another ``activation``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        down_bias: bool = False,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj", "act_fn"),
        act: nn.Module | None = None,
    ) -> None:
        super().__init__()
        expect_choice("gated_mlp", "activation", activation, ACTIVATIONS)

        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.names = names
        self.joined = names[:2]

        self.add_module(names[0], Linear(hidden_size, intermediate_size, bias=bias))
        self.add_module(names[1], Linear(hidden_size, intermediate_size, bias=bias))
        self.add_module(names[2], Linear(intermediate_size, hidden_size, bias=down_bias))

        approximate = "tanh" if activation == "gelu_tanh" else "none"
        self.act_and_mul = SiluAndMul() if activation == "silu" else GeluAndMul(approximate)

        if act is not None:
            self.add_module(names[3], act)
        self.join()

    @falls_back(
        "while a compiler traces, gate, up and the activation are computed one after the other"
    )
    def forward(self, x: Tensor) -> Tensor:
        act = self._act()
        # A compiler fuses by itself, and traces the layers one by one.
        if not torch.compiler.is_compiling() and self._gates_at_once(act):
            joint = self.joint_op(x)
            if joint is not None:
                return self.at_once(joint, x)

        modules: dict[str, Any] = self._modules
        gate, up, down = (modules[name] for name in self.names[:3])
        activate: Any = act if act is not None else functional.activation_of(self.activation)
        gated = activate(gate(x)) * up(x)
        out: Tensor = down(gated)
        return out

    def at_once(self, joint: Linear, x: Tensor) -> Tensor:
        """Compute the layer with ``joint``, the op over the weights of gate and up.

        See ``joint_op`` for the conditions. A replacement may override this with one kernel for the
        whole layer, unless the parts have hooks.
        """
        down: Any = self._modules[self.names[2]]
        out: Tensor = down(self.act_and_mul(joint.forward(x)))
        return out

    def idle(self) -> frozenset[str]:
        act = self._act()
        at_once = self.fits() and self._gates_at_once(act)
        unused = self.names[3:] if at_once else ("act_and_mul",)
        return frozenset(unused) & self._modules.keys()

    def computed_at_once(self) -> tuple[str, ...]:
        if not self._gates_at_once(self._act()):
            return ()
        return super().computed_at_once()

    def _act(self) -> nn.Module | None:
        return self._modules.get(self.names[3]) if len(self.names) > 3 else None

    def _gates_at_once(self, act: nn.Module | None) -> bool:
        """Return True if the gated activation op may stand for the layer ``act``."""
        if act is None:
            return True
        if is_observed(act) or epilogue_of(act) != self.activation:
            return False
        allowed: bool = self.chosen(may_stand_for, self._modules["act_and_mul"], act)
        return allowed

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.intermediate_size}, activation={self.activation!r}"
