"""The HTTP server: OpenAI's interface over the engine, its measurements, and the live page."""
