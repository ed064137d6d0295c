"""Where vLLM's files come from: spec strings, wheels, checkouts, receipts and the ways out when there is nothing."""

import hashlib
import json
import subprocess
import zipfile

import pytest

from pytest_engram.backends import vllm_source
from pytest_engram.errors import EngramError, UsageError

COMMON = "vllm/models/tiny/common/engram.py"


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """No installed vLLM and no environment variable decide these tests."""
    monkeypatch.setattr(vllm_source, "installed", lambda: None)
    monkeypatch.delenv(vllm_source.ENVIRONMENT, raising=False)


@pytest.fixture
def wheel(tmp_path):
    """A wheel with one Engram file and other things that must stay behind."""
    path = tmp_path / "vllm-9.9.9-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(COMMON, "DEAD_ID = -1\n")
        archive.writestr("vllm/models/tiny/attention.py", "raise SystemExit\n")
        archive.writestr("vllm/_C.abi3.so", "x" * 1000)
    return path


def test_wheel_keeps_only_engram_files_and_its_hash(wheel, tmp_path):
    """Of a wheel only the Engram files are kept; the receipt has the wheel's and each file's sha256."""
    source = vllm_source.locate(str(wheel), tmp_path / "cache")
    kept = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(kept) == ["engram.py", "receipt.json"]
    receipt = source.receipt()
    assert receipt["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert receipt[f"sha256:{COMMON}"] == hashlib.sha256(b"DEAD_ID = -1\n").hexdigest()
    assert (receipt["version"], receipt["origin"], receipt["label"]) == ("9.9.9", "wheel", "unverified")


def test_cached_version_and_fetched_folder_give_the_same_receipt(wheel, tmp_path):
    """A version in the cache, the folder itself and the wheel prove the same bytes."""
    cache = tmp_path / "cache"
    first = vllm_source.extract(wheel, cache)
    assert vllm_source.locate("9.9.9", cache) == first
    assert vllm_source.locate(str(cache / "vllm-9.9.9")) == first
    assert vllm_source.locate(str(wheel), cache) == first


def test_two_processes_may_extract_at_once(wheel, tmp_path, monkeypatch):
    """Of two that extract one wheel side by side the slower takes what the other kept, and leaves nothing beside it."""
    own, overtaken, cache = vllm_source._source, [], tmp_path / "cache"

    def late(root, *rest):
        if not overtaken:
            overtaken.append(root)
            vllm_source.extract(wheel, cache)  # the other process, from its begin to its end
        return own(root, *rest)

    monkeypatch.setattr(vllm_source, "_source", late)
    found = vllm_source.extract(wheel, cache)
    assert [path.name for path in cache.iterdir()] == ["vllm-9.9.9"] == [found.root.name]
    assert overtaken[0].parent.parent == cache  # it had a folder of its own meanwhile


def test_another_wheel_of_a_kept_version_is_refused(wheel, tmp_path):
    """A wheel with other bytes than those that were kept of its version is named, and the kept files do not run."""
    cache, other = tmp_path / "cache", tmp_path / "other" / wheel.name
    vllm_source.extract(wheel, cache)
    other.parent.mkdir()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(COMMON, "DEAD_ID = 0\n")
    with pytest.raises(EngramError, match=r"not those of .*other") as caught:
        vllm_source.locate(str(other), cache)
    assert caught.value.code == "engine-other-wheel"


def test_changed_file_is_refused(wheel, tmp_path):
    """A cached file that differs from its receipt is named and not run."""
    source = vllm_source.extract(wheel, tmp_path)
    (source.root / COMMON).write_text("DEAD_ID = 0\n")
    with pytest.raises(EngramError, match=r"common/engram\.py differ") as caught:
        vllm_source.locate("9.9.9", tmp_path)
    assert caught.value.code == "engine-files-changed"


def test_broken_receipt_is_refused(wheel, tmp_path):
    """A receipt that is no JSON is an error with a way out, not a traceback of the parser."""
    source = vllm_source.extract(wheel, tmp_path)
    (source.root / "receipt.json").write_text("{")
    with pytest.raises(EngramError, match="unreadable receipt"):
        vllm_source.locate("9.9.9", tmp_path)


def test_label_is_tested_only_for_the_known_bytes(wheel, tmp_path, monkeypatch):
    """The same version number with other bytes stays unverified."""
    source = vllm_source.extract(wheel, tmp_path)
    monkeypatch.setitem(vllm_source.TESTED, "9.9.9", source.digest)
    assert source.label == "tested"
    monkeypatch.setitem(vllm_source.TESTED, "9.9.9", "0" * 64)
    assert source.label == "unverified"


def test_absent_version_names_the_ways_out(tmp_path):
    """Neither installed nor cached: the error names pip's two commands and a path."""
    with pytest.raises(EngramError) as caught:
        vllm_source.locate("0.31.0", tmp_path)
    assert caught.value.code == "engine-absent"
    assert "pip install vllm==0.31.0" in str(caught.value)
    assert f"pip download --no-deps --only-binary=:all: --dest {tmp_path} vllm==0.31.0" in str(caught.value)


def test_plain_spec_is_the_pin(tmp_path):
    """Without a target, a variable or an installation the pinned version is looked for."""
    with pytest.raises(EngramError, match=vllm_source.PINNED):
        vllm_source.locate(None, tmp_path)


def test_variable_decides_the_plain_spec(wheel, tmp_path, monkeypatch):
    """$PYTEST_ENGRAM_VLLM takes the place of a missing target."""
    monkeypatch.setenv(vllm_source.ENVIRONMENT, str(wheel))
    assert vllm_source.locate(None, tmp_path).version == "9.9.9"


def test_installed_engine_wins_only_for_its_own_version(wheel, tmp_path, monkeypatch):
    """An installed vLLM serves the plain spec and its own version, never another one."""
    here = vllm_source.extract(wheel, tmp_path)
    monkeypatch.setattr(vllm_source, "installed", lambda: here)
    assert vllm_source.locate(None, tmp_path / "empty") is here
    assert vllm_source.locate("9.9.9", tmp_path / "empty") is here
    with pytest.raises(EngramError, match=r"0\.31\.0"):
        vllm_source.locate("0.31.0", tmp_path / "empty")


def test_checkout_is_unverified_with_commit_and_dirty_state(tmp_path):
    """A checkout's receipt has its commit, and says dirty as soon as a model file changes."""
    file = tmp_path / COMMON
    file.parent.mkdir(parents=True)
    file.write_text("A = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    clean = vllm_source.locate(str(tmp_path)).receipt()
    assert (clean["origin"], clean["label"], clean["dirty"], len(clean["commit"])) == (
        "checkout", "unverified", "false", 40,
    )  # fmt: skip
    file.write_text("A = 2\n")
    assert vllm_source.locate(str(tmp_path)).receipt()["dirty"] == "true"


def test_folder_without_git_has_an_unknown_commit(tmp_path):
    """Unknown stays unknown: no commit is invented for a plain folder."""
    (tmp_path / COMMON).parent.mkdir(parents=True)
    (tmp_path / COMMON).write_text("")
    assert vllm_source.locate(str(tmp_path)).proof == {"commit": "unknown"}


def test_path_that_is_not_there_is_a_usage_error(tmp_path):
    """A path that does not exist is named."""
    with pytest.raises(UsageError, match="no such wheel or folder"):
        vllm_source.locate(str(tmp_path / "nothing"))


def test_engine_without_engram_is_named(tmp_path):
    """An older vLLM without Engram files is refused with the version that has them."""
    with pytest.raises(EngramError, match="no Engram source files") as caught:
        vllm_source.locate(str(tmp_path))
    assert caught.value.code == "engine-without-engram"


def test_file_that_is_no_wheel_is_named(tmp_path):
    """A truncated download leaves nothing in the cache."""
    path = tmp_path / "vllm-9.9.9-cp38-abi3-linux_x86_64.whl"
    path.write_bytes(b"not a zip")
    with pytest.raises(EngramError, match="not a wheel"):
        vllm_source.locate(str(path), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_downloaded_wheel_serves_its_version(wheel, tmp_path):
    """What `pip download` left in the cache is found by its version, and its Engram files are kept."""
    source = vllm_source.locate("9.9.9", wheel.parent)
    assert source.root == tmp_path / "vllm-9.9.9"
    assert json.loads((source.root / "receipt.json").read_text())["wheel"] == wheel.name


def test_cache_folder_follows_xdg(tmp_path, monkeypatch):
    """The cache is below $XDG_CACHE_HOME, else .cache of the current folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert vllm_source.cache_folder() == tmp_path / "pytest-engram"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(vllm_source.cache_folder()) == ".cache"
