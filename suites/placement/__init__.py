"""Experiments A1 to A3: where the shared pages lie."""
