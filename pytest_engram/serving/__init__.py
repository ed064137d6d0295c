"""Continuous batching under a seeded open-loop load, the clients' records of it, and the gates' fixed batches."""
