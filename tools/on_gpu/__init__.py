"""The parts of ``tools/on_gpu.sh``, each a process with a time limit, and their report."""
