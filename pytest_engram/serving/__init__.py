"""Open-loop load, its client-side records, and readers of serving tools."""
