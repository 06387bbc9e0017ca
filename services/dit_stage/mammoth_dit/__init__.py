"""The DiT stage: conditioning rows in, pictures out. Row selection, Q-Former, transformer, VAE, request batching."""
