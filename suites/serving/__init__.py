"""Patch experiments and recorded serving results."""
