from opgraft.binding.ported.torch_library import *
