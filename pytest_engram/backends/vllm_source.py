"""Where a vLLM's own Engram source files come from, and the receipt that proves which ones run.

Three origins: an installed package, a release wheel of which only the Engram files are kept in a cache folder, and a
person's own checkout.  Nothing here imports vLLM, and nothing downloads unless :func:`fetch` is called.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
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
COMMITS = {"0.31.0": "db9527a46873454610df6dbedf79a36d6bf1a7f6"}
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
        head = {"engine": "vllm", "version": self.version, "origin": self.origin, "label": self.label}
        if self.label == "tested" and self.version in COMMITS:
            head["commit"] = COMMITS[self.version]
        return {**head, **self.proof, **{f"sha256:{path}": digest for path, digest in self.files.items()}}


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/pytest-engram``, else ``.cache`` of the current folder; engine files are never committed."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "pytest-engram") if base else Path(".cache")


def parse_spec(spec: str) -> str | None:
    """The part after ``vllm@``: a version or a path; None for plain ``vllm``."""
    name, at, target = spec.partition("@")
    if name != "vllm" or (at and not target):
        raise UsageError(
            f"backend {spec!r} names no vLLM", code="bad-engine-spec",
            expected="vllm, vllm@VERSION or vllm@PATH", way_out=f"for example vllm@{PINNED}",
        )  # fmt: skip
    return target or None


def locate(target: str | None = None, cache: Path | None = None) -> EngineSource:
    """The source that ``target`` names; plain None is $PYTEST_ENGRAM_VLLM, else the installed one, else the pin."""
    cache, target = cache or cache_folder(), target or os.environ.get(ENVIRONMENT) or None
    if target and not _VERSION.fullmatch(target):
        return _from_path(Path(target).expanduser(), cache)
    here = installed()
    if here and target in (None, here.version):
        return here
    version = target or PINNED
    kept = cache / f"vllm-{version}"
    if (kept / RECEIPT).is_file():
        return _from_extract(kept)
    raise EngramError(
        f"vLLM {version} is neither installed nor in the cache", code="engine-absent", where=str(kept),
        way_out=f"`pip install vllm=={version}`, or `python -m pytest_engram.backends.vllm_source {version}` (320 MB "
        "once, 200 KB kept), or name a wheel, a folder or a checkout with vllm@PATH",
    )  # fmt: skip


def installed() -> EngineSource | None:
    """The vLLM of this interpreter, found without importing it; None if there is none."""
    try:
        version, found = metadata.version("vllm"), importlib.util.find_spec("vllm")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    if found is None or found.origin is None:
        return None
    root = Path(found.origin).parent.parent
    return _from_folder(root, version=version, origin="installed", proof=_git(root))


def extract(wheel: Path, cache: Path) -> EngineSource:
    """Keep only the Engram files of ``wheel`` in ``cache``, with the wheel's sha256 as receipt; atomic."""
    version = wheel.name.split("-")[1]
    target = cache / f"vllm-{version}"
    if (target / RECEIPT).is_file():
        return _from_extract(target)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder, target.name)
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(made, filter(_ENGRAM_FILE.fullmatch, archive.namelist()))
        except zipfile.BadZipFile:
            raise EngramError(
                "not a wheel", code="bad-wheel", where=str(wheel), way_out="remove the file and download it again"
            ) from None
        source = _from_folder(made, version=version, origin="wheel", proof={"wheel_sha256": _sha256(wheel)})
        note = {"version": version, "wheel": wheel.name, **source.proof, "files": source.files}
        (made / RECEIPT).write_text(json.dumps(note, indent=1) + "\n", "utf-8")
        made.rename(target)
    return _from_extract(target)


def fetch(version: str = PINNED, cache: Path | None = None) -> EngineSource:
    """Download the wheel of ``version`` with pip, keep its Engram files, drop the rest."""
    cache = cache or cache_folder()
    if (cache / f"vllm-{version}" / RECEIPT).is_file():
        return _from_extract(cache / f"vllm-{version}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder]
        done = subprocess.run([*command, f"vllm=={version}"], capture_output=True, text=True, check=False)
        if wheels := list(Path(folder).glob("vllm-*.whl")):
            return extract(wheels[0], cache)
    raise EngramError(
        (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1], code="engine-download", who="pip download",
        way_out="check the network and the version, or pass a wheel with vllm@PATH.whl",
    )  # fmt: skip


def _from_path(path: Path, cache: Path) -> EngineSource:
    if path.suffix == ".whl" and path.is_file():
        return extract(path, cache)
    if not path.is_dir():
        raise UsageError(
            "no such wheel or folder", code="no-engine-path", where=str(path),
            expected="a vLLM wheel, a fetched folder or a checkout", way_out="check the part after vllm@",
        )  # fmt: skip
    if (path / RECEIPT).is_file():
        return _from_extract(path)
    return _from_folder(path, version="checkout", origin="checkout", proof=_git(path))


def _from_folder(root: Path, *, version: str, origin: str, proof: dict[str, str]) -> EngineSource:
    paths = [path.relative_to(root).as_posix() for path in sorted(root.glob("vllm/models/**/*.py"))]
    files = {path: _sha256(root / path) for path in paths if _ENGRAM_FILE.fullmatch(path)}
    if not files:
        raise EngramError(
            f"vLLM {version} has no Engram source files", code="engine-without-engram", where=str(root),
            expected="vllm/models/*/common/engram.py", way_out=f"use vLLM 0.30 or newer, for example vllm@{PINNED}",
        )  # fmt: skip
    return EngineSource(version=version, origin=origin, root=root, files=files, proof=proof)


def _from_extract(folder: Path) -> EngineSource:
    try:
        noted = json.loads((folder / RECEIPT).read_text("utf-8"))
        version, proof, hashes = noted["version"], {"wheel_sha256": noted["wheel_sha256"]}, dict(noted["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise _changed(folder, f"unreadable receipt ({error})") from None
    source = _from_folder(folder, version=version, origin="wheel", proof=proof)
    if changed := sorted({path for path, _ in hashes.items() ^ source.files.items()}):
        raise _changed(folder, f"{', '.join(changed)} differ from the receipt")
    return source


def _changed(folder: Path, seen: str) -> EngramError:
    return EngramError(
        seen, code="engine-files-changed", where=str(folder), expected="the files as the wheel has them",
        way_out="remove the folder and fetch again, or name edited files as a checkout (a folder without receipt)",
    )  # fmt: skip


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


if __name__ == "__main__":
    for _version in sys.argv[1:] or [PINNED]:
        sys.stdout.write(json.dumps(fetch(_version).receipt(), indent=1) + "\n")
