"""LoRA adapters of requests."""
