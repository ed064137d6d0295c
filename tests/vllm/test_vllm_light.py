"""The light way of loading: private imports, stand-ins, placeholders and the errors they give."""

import sys
import types

import pytest

from pytest_engram.backends import vllm_light
from pytest_engram.backends.vllm_light import LightEngine, Surroundings
from pytest_engram.backends.vllm_source import locate
from pytest_engram.errors import EngramError, NotMeasurable

pytest.importorskip("torch", reason="stand-ins wrap torch")
pytest.importorskip("triton", reason="stand-ins hand out Triton")


@pytest.fixture
def load(tmp_path):
    """Load an engine whose Engram files have the given text."""

    def loaded(**around):
        texts = around.pop("files")
        for name, text in texts.items():
            path = tmp_path / "vllm/models/tiny" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return LightEngine(locate(str(tmp_path)), Surroundings(interpreted=True, **around))

    return loaded


def test_sys_modules_is_never_touched(load):
    """Loading leaves the interpreter's modules as they were, also for a real vLLM that is imported."""
    sys.modules["vllm"] = real = types.ModuleType("vllm")
    try:
        before = dict(sys.modules)
        engine = load(files={"common/engram.py": "from vllm.triton_utils import tl, triton\nimport vllm.config as c\n"})
        assert sys.modules == before
        assert sys.modules["vllm"] is real
        assert engine.get("triton") is sys.modules["triton"]
    finally:
        del sys.modules["vllm"]


def test_gpu_file_comes_before_the_common_one_and_imports_it(load):
    """An Engram file imports another one for real, and the GPU file's names win."""
    engine = load(
        files={
            "common/engram.py": "ROWS = 16\nclass Engram: part = 'common'\n",
            "nvidia/engram.py": "from vllm.models.tiny.common.engram import ROWS, Engram as Base\n"
            "class Engram(Base): rows = ROWS\n",
        }
    )
    assert engine.get("Engram").rows == 16
    assert engine.get("Engram").part == "common"
    assert engine.get("Base") is not engine.get("Engram")


def test_import_inside_a_function_is_private_too(load):
    """An import that runs later is answered by the same stand-ins; ordinary modules are the real ones."""
    text = "def rank():\n    from vllm.distributed import get_tensor_model_parallel_rank as rank\n    import json\n"
    engine = load(files={"common/engram.py": text + "    return rank(), json\n"}, tp_rank=3)
    rank, module = engine.get("rank")()
    assert rank == 3
    assert module is sys.modules["json"]


def test_relative_import_finds_the_neighbour_file(load):
    """A relative import is resolved within the engine."""
    engine = load(
        files={"common/engram.py": "from .engram_ids import DEAD_ID\n", "common/engram_ids.py": "DEAD_ID = -1\n"}
    )
    assert engine.get("DEAD_ID") == -1


def test_unknown_neighbour_is_good_in_annotations_and_named_when_called(load):
    """A neighbour without a stand-in stops nothing until the engine calls it."""
    text = "from vllm.new.place import Thing\ndef use(x: Thing | None = None):\n    return Thing(1)\n"
    engine = load(files={"common/engram.py": text})
    with pytest.raises(EngramError, match=r"vllm\.new\.place\.Thing") as caught:
        engine.get("use")()
    assert caught.value.code == "engine-neighbour"


def test_missing_name_says_the_interface_changed(load):
    """A class that a later vLLM no longer has is named, with a version that has it."""
    with pytest.raises(EngramError, match="no NgramHashState") as caught:
        load(files={"common/engram.py": ""}).get("NgramHashState")
    assert caught.value.code == "engine-api-changed"


@pytest.mark.parametrize("text", ["import no_such_module\n", "def broken(:\n", "1 / 0\n"])
def test_file_that_does_not_load_is_named(load, text):
    """Whatever fails while the file runs becomes one error with the file's path."""
    with pytest.raises(EngramError, match=r"engram\.py") as caught:
        load(files={"common/engram.py": text})
    assert caught.value.code == "engine-import"


def test_annotations_stay_objects(load):
    """The loader's future import is not inherited: Triton refuses a kernel whose annotations became text."""
    engine = load(files={"common/engram.py": "def kernel(size: int if False else None): pass\n"})
    assert engine.get("kernel").__annotations__ == {"size": None}


def test_engine_sees_its_own_torch(load):
    """The interpreter answers as a device and collectives go to our group; the rest is torch's own."""
    calls = []

    class Group:
        def all_gather(self, value, *, step):
            return [value, "peer"]

        def barrier(self, *, step):
            calls.append(step)

    engine = load(files={"common/engram.py": "import torch\n"})
    seen = engine.get("torch")
    out = [None, None]
    seen.distributed.all_gather_object(out, "own", group=Group())
    seen.distributed.barrier(group=Group())
    assert out == ["own", "peer"]
    assert calls == ["engine barrier"]
    assert seen.cuda.get_device_properties(0).multi_processor_count == vllm_light.INTERPRETED_SMS
    assert seen.int32 is sys.modules["torch"].int32


def test_too_little_shared_memory_is_refused(load):
    """S1: the free-space check refuses a table that does not fit, as vLLM's own does."""
    text = "from vllm.distributed.device_communicators.shm_broadcast import SHM_PATH, check_shm_free_space\n"
    engine = load(files={"common/engram.py": text})
    engine.get("check_shm_free_space")(1)
    with pytest.raises(RuntimeError, match="Insufficient space in /dev/shm"):
        engine.get("check_shm_free_space")(1 << 60, allocation_name="Engram tables")


def test_missing_triton_has_a_way_out(monkeypatch):
    """No Triton is a named absence, not an import traceback."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotMeasurable, match=r"pip install --no-deps triton==3\.8\.0") as caught:
        vllm_light.prepare_triton()
    assert caught.value.code == "no-triton"


def test_triton_as_compiler_without_cuda_is_refused(monkeypatch):
    """Triton that was imported to compile cannot be turned into the interpreter; the error says how to start."""
    fake = types.SimpleNamespace(language=types.SimpleNamespace(sum=len))
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setattr(sys.modules["torch"].cuda, "is_available", lambda: False)
    with pytest.raises(NotMeasurable, match="TRITON_INTERPRET=1"):
        vllm_light.prepare_triton()
