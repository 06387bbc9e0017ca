"""The LLM: configuration, plain decoder, strict loading. Knows nothing of requests."""
