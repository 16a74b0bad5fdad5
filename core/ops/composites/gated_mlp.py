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

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@CustomOp.register("gated_mlp")
class GatedMLP(JointLayer):
    """``down(act(gate(x)) · up(x))`` (Shazeer, arXiv:2002.05202), with gate and up computed by one linear op.

    The weights of gate and up lie side by side in memory, as one ``[2 · intermediate_size, hidden_size]``; parameters,
    their names, values and storages are those of two layers. The joint product goes to the gated activation op. Where
    the layers must be called one by one (see ``JointLayer.joint_op``), where ``act`` has hooks, or where somebody
    provides a kernel for ``act`` and not for the gated activation (see ``may_stand_for``), ``act`` and the product
    follow one by one too.

    Args:
        hidden_size: elements of the last dimension of input and output.
        intermediate_size: elements between them.
        activation: ``"silu"``, ``"gelu"`` (exact) or ``"gelu_tanh"``.
        bias: whether gate and up have a bias.
        down_bias: whether down has one.
        names: what gate, up and down are called, and ``act`` where it is given.
        act: the activation as a layer of its own, for a model that has one; without it, it is torch's function.

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
        # A compiler calls them one by one.
        at_once = not torch.compiler.is_compiling() and self._gates_at_once(act)
        joint = self.joint_op(x) if at_once else None
        if joint is not None:
            return self.at_once(joint, x)
        modules: dict[str, Any] = self._modules
        gate, up, down = (modules[name] for name in self.names[:3])
        activate: Any = act if act is not None else functional.ACTIVATIONS[self.activation]
        out: Tensor = down(activate(gate(x)) * up(x))
        return out

    def at_once(self, joint: Linear, x: Tensor) -> Tensor:
        """Compute the layer with ``joint``, the op over the weights of gate and up; see ``joint_op`` for when.

        A replacement may override this with one kernel for all of it, where nobody waits for its parts to be called.
        """
        out: Tensor = self._modules[self.names[2]](self.act_and_mul(joint.forward(x)))  # type: ignore[misc]
        return out

    def idle(self) -> frozenset[str]:
        act = self._act()
        at_once = self.fits() and self._gates_at_once(act)
        unused = self.names[3:] if at_once else ("act_and_mul",)
        return frozenset(unused) & self._modules.keys()

    def computed_at_once(self) -> tuple[str, ...]:
        return super().computed_at_once() if self._gates_at_once(self._act()) else ()

    def _act(self) -> nn.Module | None:
        return self._modules.get(self.names[3]) if len(self.names) > 3 else None

    def _gates_at_once(self, act: nn.Module | None) -> bool:
        """Decide whether the gated activation op may do what the layer ``act`` would."""
        if act is None:
            return True
        if is_observed(act) or epilogue_of(act) != self.activation:
            return False
        allowed: bool = self.chosen(may_stand_for, self._modules["act_and_mul"], act)
        return allowed

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.intermediate_size}, activation={self.activation!r}"
