"""What all tests share: Triton's interpreter where there is no GPU."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # must be decided before the first import of triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
