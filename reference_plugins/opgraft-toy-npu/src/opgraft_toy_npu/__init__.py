"""An opgraft plugin for a simulated NPU."""
