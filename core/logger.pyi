from opgraft.binding.ported.logger import *  # noqa: F403  # the names of that module
