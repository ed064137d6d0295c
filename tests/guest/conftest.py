"""The suites in ``inside`` run in the guest only; ``run.py`` boots it, and ``test_boot.py`` tests that on the host."""

import os

collect_ignore_glob = [] if os.environ.get("PYTEST_ENGRAM_GUEST") else ["inside/*"]
