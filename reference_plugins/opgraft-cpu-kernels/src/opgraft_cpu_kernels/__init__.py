"""Native kernels for opgraft's CPU platform.

The kernels are compiled for several instruction sets, the paths: ``amx``, ``avx512_bf16``,
``avx512``, ``avx2`` and ``scalar``. The fastest path of the CPU is in force. The environment
variable ``CPU_KERNELS_PATH`` and the function ``set_path`` choose another one.
"""

from opgraft_cpu_kernels.library import missing, path, paths, set_path

__all__ = ["missing", "path", "paths", "set_path"]
