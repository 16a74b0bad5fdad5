"""The version of opgraft."""

__version__ = "0.1.0"
