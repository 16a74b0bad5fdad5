from opgraft.binding.ported.torch_library import *  # noqa: F403  # the names of that module
