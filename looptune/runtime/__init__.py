"""Kernels as callables: executable memory, the call contract, threads."""
