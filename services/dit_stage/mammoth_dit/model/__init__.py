"""The DiT model in the plain path: one module per block family, and the strict loader of their weights."""
