"""The HTTP server: OpenAI's interface on the engine."""
