"""Measured beside stock ExecuTorch, in the same run. ``python -m benchmarks``."""
