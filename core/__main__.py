"""``python -m opgraft``."""

from opgraft.cli import main

main()
