"""``pytest-engram audit``: where a live server's tables lie.  Read-only, standard library only, also one .pyz file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import zipapp
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_engram.audit import judging, reading
from pytest_engram.audit.report import Report, look, render
from pytest_engram.errors import EngramError, NotMeasurable, UsageError

_BUNDLE = ("__init__.py", "errors.py", "probe.py", "model/*.py", "audit/*.py", "gpu/__init__.py", "gpu/nvml.py",
           *(f"numa/{name}.py" for name in ("__init__", "_syscalls", "devices", "pages", "procfs", "topology", "tree")))


def add_arguments(command: argparse.ArgumentParser) -> None:
    pass
