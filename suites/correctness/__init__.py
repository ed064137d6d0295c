"""Contract cases against the backend under test."""
