from opgraft.binding.ported.custom_op import *
