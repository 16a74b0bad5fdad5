"""What ``tools/on_gpu.sh`` runs on a machine with a GPU: parts, each a process with a time limit, and their report."""
