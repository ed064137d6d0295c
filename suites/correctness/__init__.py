"""Does the system under test follow the behaviour contract?  Runs without a GPU, also under ``-n auto``."""
