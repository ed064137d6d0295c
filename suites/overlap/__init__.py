"""Experiments B1 and B2: the serial prefetch queue."""
