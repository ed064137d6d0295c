"""The GPU world: registration, views, kernels, streams and timelines.  torch and triton are imported lazily."""
