"""Patch experiments: base against candidate."""
