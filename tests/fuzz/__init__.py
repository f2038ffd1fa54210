"""Mutated programs in guarded child processes; see run.py."""
