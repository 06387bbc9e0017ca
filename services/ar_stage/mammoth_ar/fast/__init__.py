"""The fast path of the AR stage: fused kernels, one graph of a decode step for any mix of 32 rows, a host that runs ahead."""
