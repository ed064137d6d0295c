"""Systems under test, found by entry point or import path."""
