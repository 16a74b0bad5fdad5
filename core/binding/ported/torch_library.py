"""``direct_register_custom_op``, under the name in vLLM."""

from opgraft.binding.torch_library import direct_register_custom_op as direct_register_custom_op
