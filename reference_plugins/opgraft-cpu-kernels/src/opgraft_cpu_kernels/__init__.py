"""Native kernels for opgraft's CPU platform, in paths for ``amx``, ``avx512_bf16``, ``avx512``, ``avx2`` and any CPU.

The fastest that the CPU has is in force, unless the environment variable ``CPU_KERNELS_PATH`` or ``set_path``
names another.
"""

from opgraft_cpu_kernels.library import missing, path, paths, set_path

__all__ = ["missing", "path", "paths", "set_path"]
