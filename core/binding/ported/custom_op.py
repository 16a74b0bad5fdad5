"""``CustomOp`` and the registries of ops, under the names in vLLM."""

from opgraft.binding.custom_op import CustomOp as CustomOp
from opgraft.binding.custom_op import PluggableLayer as PluggableLayer
from opgraft.binding.custom_op import maybe_get_oot_by_class as maybe_get_oot_by_class

op_registry = CustomOp.op_registry
op_registry_oot = CustomOp.op_registry_oot
