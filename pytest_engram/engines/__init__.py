"""Engines that run the suite loop: ``cpu`` and ``cuda``."""
