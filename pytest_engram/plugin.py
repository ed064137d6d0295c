"""The pytest plugin: options, markers, exit code.  Cheap to load; heavy imports wait for the hook that needs them."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from pytest_engram.errors import EngramError

MARKERS = (
    "correctness: contract cases of the backend under test; no GPU needed",
    "numa: placement experiments A1 to A3, measured through all gates",
    "overlap: prefetch experiments B1 and B2, measured through all gates",
    "serving: patch experiments, base against candidate, measured through all gates",
    "gpu: needs a CUDA device",
    "multigpu(n): needs n CUDA devices",
    "slow: takes more than a minute",
    "engram_experiments(variable, ...): parametrise `engram_experiment` over the experiments that change it",
)

_DEVICES: dict[str, Callable[..., int]] = {"gpu": lambda: 1, "multigpu": lambda n: n}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Everything a user may choose; values are checked at start-up."""
    group = parser.getgroup("engram", "Engram placement, overlap and correctness gates")
    add = group.addoption
    add("--engram-backend", default="reference", metavar="NAME|pkg.mod:Class", help="system under test")
    add("--engram-candidate", metavar="NAME|pkg.mod:Class", help="candidate of the patch experiment (base: backend)")
    add("--engram-engine", default="auto", choices=("auto", "cpu", "cuda"), help="engine of the suite loop")
    add("--engram-experiments", action="append", metavar="PATH", help="YAML file or folder instead of the built-ins")
    add("--engram-gate", default="enforce", choices=("enforce", "report"), help="whether verdicts set the exit code")
    add("--engram-require", metavar="B1:4,A3:1", help="gates that must be reached; others are reported only")
    add("--engram-time-budget", metavar="10m", help="refuse experiments whose schedule cannot fit")
    add("--engram-report", metavar="DIR", help="where the run's folder goes (default: reports/run-<time>)")
    add("--engram-rows", metavar="N|full", help="rows per Engram layer (default: 24 GiB per table where it fits)")
    add("--engram-pairs", type=int, metavar="N", help="blocks per schedule instead of the experiment's own")
    add("--engram-seed", type=int, default=20261, metavar="N", help="seed of schedule, load and table content")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Offer this plugin's own hooks."""
    from pytest_engram import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register markers and fixtures; refuse bad options before anything is collected."""
    from pytest_engram import provide
    from pytest_engram.edge import Edge

    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(provide, "engram-fixtures")
    try:
        edge = Edge(config)
    except (EngramError, OSError) as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(edge, "engram-edge")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` or `multigpu(n)` where there are fewer CUDA devices than it needs."""
    marked = ((count, mark) for name, count in _DEVICES.items() for mark in item.iter_markers(name))
    needed = [count(*mark.args, **mark.kwargs) for count, mark in marked]
    if needed:
        from pytest_engram import engines

        count, why = engines.cuda_devices()
        if count < max(needed):
            pytest.skip(f"needs {max(needed)} CUDA device(s), found {count}{why and f': {why}'}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A user's mistake found late still reads as one sentence, not as a traceback."""
    try:
        return (yield)
    except EngramError as error:
        pytest.fail(f"{item.name}: {error}", pytrace=False)
