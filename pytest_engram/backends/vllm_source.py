"""Where a vLLM's own Engram source files come from, and the receipt that proves which ones run.

Three origins: an installed package, a release wheel of which only the Engram files are kept in a cache folder, and a
person's own checkout.  Nothing here imports vLLM or downloads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pytest_engram.errors import EngramError, UsageError

PINNED = "0.31.0"
ENVIRONMENT = "PYTEST_ENGRAM_VLLM"
RECEIPT = "receipt.json"
# Releases whose Engram files the contract was run against: digest of (path, sha256) pairs.
TESTED = {
    "0.31.0": "798dc31d7ad7f92a6a00a7c1d5176e7152fc45a541de5a99f070083104fdf367",
    "0.33.0": "97760a8d57186435f40720c313ed17d4550051059fc9c7a389b04119bbabdf51",
}
_ENGRAM_FILE = re.compile(r"vllm/models/.*engram.*\.py")
_VERSION = re.compile(r"\d+(\.\w+)+(\+\w+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """Engram files of one engine: ``files`` maps paths under ``root`` to their sha256."""

    version: str
    origin: str  # "installed", "wheel" or "checkout"
    root: Path
    files: dict[str, str]
    proof: dict[str, str]

    @property
    def digest(self) -> str:
        """One sha256 over all paths and hashes."""
        lines = "".join(f"{path} {digest}\n" for path, digest in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def label(self) -> str:
        """``tested`` if these are the bytes of a release the contract was run against, else ``unverified``."""
        return "tested" if TESTED.get(self.version) == self.digest else "unverified"

    def receipt(self) -> dict[str, str]:
        """Flat strings: version, origin, label, wheel hash or commit and dirty state, one hash per file."""
        head = {"engine": "vllm", "version": self.version, "origin": self.origin, "label": self.label, **self.proof}
        return {**head, **{f"sha256:{path}": digest for path, digest in self.files.items()}}


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/pytest-engram``, else ``.cache`` of the current folder; engine files are never committed."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "pytest-engram") if base else Path(".cache")


def locate(target: str | None = None, cache: Path | None = None) -> EngineSource:
    """The source that ``target`` names; plain None is $PYTEST_ENGRAM_VLLM, else the installed one, else the pin.

    A version that is not installed is looked for in ``cache``: its kept files, else its wheel.
    """
    cache, target = cache or cache_folder(), target or os.environ.get(ENVIRONMENT) or None
    if target and not _VERSION.fullmatch(target):
        path = Path(target).expanduser()
        if path.is_dir():
            return _source(path)
        if path.suffix == ".whl" and path.is_file():
            return extract(path, cache)
        raise UsageError(
            "no such wheel or folder", code="no-engine-path", where=str(path),
            expected="a vLLM wheel, a kept folder or a checkout", way_out="check the part after vllm@",
        )  # fmt: skip
    here = installed()
    if here and target in (None, here.version):
        return here
    version = target or PINNED
    kept = cache / f"vllm-{version}"
    if (kept / RECEIPT).is_file():
        return _source(kept)
    if wheels := list(cache.glob(f"{kept.name}-*.whl")):
        return extract(wheels[0], cache)
    raise EngramError(
        f"vLLM {version} is neither installed nor in the cache", code="engine-absent", where=str(kept),
        way_out=f"`pip install vllm=={version}`, or `pip download --no-deps --only-binary=:all: --dest {cache} "
        f"vllm=={version}` (320 MB), or name a wheel, a folder or a checkout with vllm@PATH",
    )  # fmt: skip


def installed() -> EngineSource | None:
    """The vLLM of this interpreter, found without importing it; None if there is none."""
    try:
        version, found = metadata.version("vllm"), importlib.util.find_spec("vllm")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    return _source(Path(found.origin).parents[1], version, "installed") if found and found.origin else None


def extract(wheel: Path, cache: Path) -> EngineSource:
    """Keep only the Engram files of ``wheel`` in ``cache``, with the wheel's sha256 as receipt; atomic."""
    version, digest = wheel.name.split("-")[1], _sha256(wheel)
    target = cache / f"vllm-{version}"
    if not target.is_dir():
        _keep(wheel, {"version": version, "wheel": wheel.name, "wheel_sha256": digest}, target)
    source = _source(target)
    if source.proof.get("wheel_sha256") != digest:
        raise EngramError(
            f"the files kept there are not those of {wheel}", code="engine-other-wheel", where=str(target),
            way_out="remove the folder, or choose another cache by XDG_CACHE_HOME",
        )  # fmt: skip
    return source


def _keep(wheel: Path, note: dict[str, str], target: Path) -> None:
    cache = target.parent
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder, target.name)
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(made, [name for name in archive.namelist() if _ENGRAM_FILE.fullmatch(name)])
        except zipfile.BadZipFile:
            way_out = "remove the file and download it again"
            raise EngramError("not a wheel", code="bad-wheel", where=str(wheel), way_out=way_out) from None
        files = _source(made, note["version"]).files
        (made / RECEIPT).write_text(json.dumps({**note, "files": files}, indent=1) + "\n", "utf-8")
        with suppress(OSError):  # another process was first
            made.rename(target)


def _source(root: Path, version: str = "checkout", origin: str = "checkout") -> EngineSource:
    """The Engram files below ``root``: as the receipt there has them, else with the state of the checkout."""
    paths = [path.relative_to(root).as_posix() for path in sorted(root.glob("vllm/models/**/*.py"))]
    files = {path: _sha256(root / path) for path in paths if _ENGRAM_FILE.fullmatch(path)}
    if not files:
        raise EngramError(
            f"vLLM {version} has no Engram source files", code="engine-without-engram", where=str(root),
            expected="vllm/models/*/common/engram.py", way_out=f"use vLLM 0.30 or newer, for example vllm@{PINNED}",
        )  # fmt: skip
    if not (root / RECEIPT).is_file():
        return EngineSource(version=version, origin=origin, root=root, files=files, proof=_git(root))
    try:
        noted = json.loads((root / RECEIPT).read_text("utf-8"))
        version, proof = noted["version"], {"wheel_sha256": noted["wheel_sha256"]}
        wrong = ", ".join(sorted({path for path, _ in noted["files"].items() ^ files.items()}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"unreadable receipt ({error}), files"
    if wrong:
        raise EngramError(
            f"{wrong} differ from the receipt", code="engine-files-changed", where=str(root),
            way_out="remove the folder and fetch again, or name edited files as a checkout (a folder without receipt)",
        )  # fmt: skip
    return EngineSource(version=version, origin="wheel", root=root, files=files, proof=proof)


def _git(root: Path) -> dict[str, str]:
    git, text = shutil.which("git"), ""
    if git and (root / ".git").exists():
        command = [git, "-C", str(root), "status", "--porcelain=v2", "--branch", "--", "vllm/models"]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    commit = re.search(r"^# branch\.oid ([0-9a-f]{40})$", text, re.MULTILINE)
    if not commit:
        return {"commit": "unknown"}
    return {"commit": commit[1], "dirty": str(bool(re.search(r"^[^#]", text, re.MULTILINE))).lower()}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
