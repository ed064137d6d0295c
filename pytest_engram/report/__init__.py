"""Renderers of a verdict: terminal, Markdown, JSON.  None of them decides anything."""
