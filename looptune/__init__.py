"""looptune: fast, verified CPU kernels for tensor contractions."""
