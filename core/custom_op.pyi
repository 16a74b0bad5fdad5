from opgraft.binding.ported.custom_op import *  # noqa: F403  # the names of that module
