"""Load vLLM's own Engram files as they are, with the neighbours they import replaced by small stand-ins.

The files are executed with a private ``__import__``: a name under ``vllm.`` is another Engram file or a stand-in,
every other import is the real one.  ``sys.modules`` is never touched, so two versions and a real vLLM can live side
by side.  A neighbour without a stand-in becomes a placeholder that says its name when the engine really uses it.
"""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from pytest_engram.backends.streams import require
from pytest_engram.backends.virtual import VirtualCuda
from pytest_engram.backends.vllm_source import EngineSource
from pytest_engram.errors import EngramError, NotMeasurable

INTERPRETED_SMS = 16  # the interpreter has no SMs; a small machine makes grids wrap in small cases
INTERPRETER = threading.RLock()  # Triton's interpreter is one per process and not safe for threads
_SHM = "/dev/shm"  # noqa: S108  vLLM's own constant, not a file that is created here


@dataclass(slots=True)
class Surroundings:
    """What the engine asks of the world around it; one rank without a DP group unless set.

    Where kernels are interpreted, ``cuda`` is a virtual GPU, on which their launches wait for a synchronise.
    """

    interpreted: bool
    cuda: Any = None
    tp_rank: int = 0
    tp_size: int = 1
    group: Any = None  # the DP replicas that share one table
    config: Any = None
    forward: Any = None  # the forward context, with dp_metadata
    torch: dict[str, Any] = field(default_factory=dict)  # names that replace torch's own


def prepare_triton() -> bool:
    """True if kernels run under Triton's interpreter: decided before Triton is imported, by the absence of CUDA."""
    cuda = require("torch").cuda.is_available()
    if not cuda and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    triton = require("triton", "pip install --no-deps triton==3.8.0 (runs interpreted beside a CPU torch)")
    interpreted = type(triton.language.sum).__name__ == "InterpretedFunction"
    if not interpreted and not cuda:
        raise NotMeasurable(
            "Triton was imported as a compiler, but there is no CUDA device", code="triton-not-interpreted",
            expected="TRITON_INTERPRET=1 before the first import of triton",
            way_out="set TRITON_INTERPRET=1 in the environment and start again",
        )  # fmt: skip
    return interpreted


class LightEngine:
    """One vLLM's Engram modules.  ``get`` finds a public class or function in the GPU file, else in the common one."""

    def __init__(self, source: EngineSource, around: Surroundings) -> None:
        self.source, self.around = source, around
        self._files = {path[:-3].replace("/", "."): path for path in source.files}
        self._modules: dict[str, ModuleType] = {}
        around.cuda = VirtualCuda() if around.interpreted else importlib.import_module("torch").cuda
        self._names = _stand_ins(around)
        around.torch.update(_torch_names(around))
        ends = (".nvidia.engram", ".common.engram")
        self.entries = [self._module(name) for end in ends for name in sorted(self._files) if name.endswith(end)]

    def get(self, name: str) -> Any:
        """The engine's own ``name``; ``EngramError`` if its files have no such thing."""
        for module in self.entries:
            if hasattr(module, name):
                return getattr(module, name)
        raise EngramError(
            f"no {name} in its Engram files", code="engine-api-changed", who=f"vLLM {self.source.version}",
            where=str(self.source.root), way_out="use a tested version, for example vllm@0.31.0",
        )  # fmt: skip

    def _module(self, name: str) -> ModuleType:
        if name not in self._modules:
            if name not in self._files:  # then its names are stand-ins, whichever module they live in
                self._modules[name] = Overlay(name, self._names, lambda item: _Missing(item, (), {"module": name}))
            else:
                self._modules[name] = ModuleType(name)
                self._run(self._modules[name], self.source.root / self._files[name])
        return self._modules[name]

    def _run(self, module: ModuleType, path: Path) -> None:
        scope = module.__dict__
        scope.update(__file__=str(path), __package__=module.__name__.rpartition(".")[0])
        scope["__builtins__"] = {**vars(builtins), "__import__": self._import}
        try:
            # Without inheriting this file's future import, which would turn the kernels' annotations into text.
            exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), scope)  # noqa: S102  running it is the point
        except Exception as error:
            raise EngramError(
                f"{type(error).__name__}: {error}", code="engine-import", who=f"vLLM {self.source.version}",
                where=str(path), way_out="use a tested version of vLLM, torch and triton",
            ) from error  # fmt: skip
        if "torch" in scope:
            scope["torch"] = Overlay("torch", self.around.torch, partial(getattr, sys.modules["torch"]))

    def _import(self, name: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if level:
            name = importlib.util.resolve_name("." * level + name, scope["__package__"])
        if name.partition(".")[0] != "vllm":
            return builtins.__import__(name, scope, local, names)
        return self._module(name if names else "vllm")


class Overlay(ModuleType):
    """A module whose names come from ``names``, else from ``other``."""

    def __init__(self, name: str, names: dict[str, Any], other: Callable[[str], Any]) -> None:
        super().__init__(name)
        self._names, self._other = names, other

    def __getattr__(self, name: str) -> Any:
        return self._names[name] if name in self._names else self._other(name)


class _Missing(type):
    """A class in the place of a neighbour: good in annotations, an error that names it when it is called."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise EngramError(
            f"the engine called {cls.__dict__['module']}.{cls.__name__}, which has no stand-in",
            code="engine-neighbour", way_out="run this path with a full vLLM, or add a stand-in",
        )  # fmt: skip


class _Collectives:
    """The two collectives of the storage protocol, on our own rendezvous (``numa.group.Group``)."""

    @staticmethod
    def all_gather_object(out: list[Any], value: Any, group: Any) -> None:
        out[:] = group.all_gather(value, step="engine all_gather")

    @staticmethod
    def barrier(group: Any) -> None:
        group.barrier(step="engine barrier")


class _Log(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic only from Python 3.11
    info_once, warning_once = logging.LoggerAdapter.info, logging.LoggerAdapter.warning


def _check_free_space(wanted: int, path: str = _SHM, *, allocation_name: str = "shared-memory allocation") -> None:
    if wanted > (free := shutil.disk_usage(path).free):
        raise RuntimeError(f"Insufficient space in {path} for {allocation_name}: {wanted} bytes, {free} free")


def _torch_names(around: Surroundings) -> dict[str, Any]:
    """torch as an engine sees it: collectives go to our own group, and the interpreter answers as a device."""
    if not around.interpreted:
        return {"distributed": _Collectives}
    empty, sms = importlib.import_module("torch").empty, SimpleNamespace(multi_processor_count=INTERPRETED_SMS)
    return {
        "distributed": _Collectives, "accelerator": SimpleNamespace(current_device_index=lambda: 0),
        "cuda": Overlay("cuda", {"get_device_properties": lambda _: sms}, partial(getattr, around.cuda)),
        "empty": lambda *shape, **how: empty(*shape, **{**how, "pin_memory": False}),  # no GPU pins it
    }  # fmt: skip


def _stand_ins(around: Surroundings) -> dict[str, Any]:
    torch, triton = importlib.import_module("torch"), importlib.import_module("triton")
    cuda, linear = torch.cuda, partial(torch.nn.Linear, bias=False, dtype=torch.bfloat16)
    return {
        "triton": triton, "tl": triton.language, "SHM_PATH": _SHM, "check_shm_free_space": _check_free_space,
        "get_current_vllm_config": lambda: around.config,
        "get_tensor_model_parallel_rank": lambda: around.tp_rank,
        "get_tensor_model_parallel_world_size": lambda: around.tp_size,
        "get_dp_group": lambda: around.group, "get_engram_dp_group": lambda: around.group,
        "get_engram_dp_size": lambda: around.group.world_size if around.group else 1,
        "get_forward_context": lambda: around.forward,
        "is_forward_context_available": lambda: around.forward is not None,
        "init_logger": lambda name: _Log(logging.getLogger(name), {}),
        "set_weight_attrs": lambda parameter, values: parameter.__dict__.update(values),
        "eager_break_during_capture": lambda function: function,
        # The projection of one TP rank, not quantised.
        "ColumnParallelLinear": lambda inputs, outputs, **_: linear(inputs, outputs),
        "current_platform": SimpleNamespace(
            is_cuda=cuda.is_available, is_rocm=lambda: False,
            is_device_capability_family=lambda family, device: cuda.get_device_capability(device)[0] == family // 10,
        ),
        "is_uva_available": lambda: True,  # host memory has the virtual GPU's addresses, too
        # A Triton kernel takes a registered host tensor as it is: its address is valid on the device.
        "get_accelerator_view_from_cpu_tensor": lambda tensor: tensor,
    }  # fmt: skip
