from opgraft.binding.ported.logger import *
