"""The fast path of the DiT stage: one packed forward for both guidance passes, fused kernels, a CUDA graph per shape."""
