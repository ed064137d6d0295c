"""The ``pytest-engram`` command: what can be done without collecting a test."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_engram import audit
from pytest_engram.errors import EngramError, NotMeasurable, UsageError

EXIT_USAGE = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit code 4."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.handler(arguments))
    except NotMeasurable as absent:
        print(f"NOT_MEASURED: {absent}", file=sys.stderr)
        return 12
    except (EngramError, OSError) as error:
        print(f"pytest-engram: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, (UsageError, OSError)) else 3  # 1: found something


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pytest-engram", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, handler: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(handler=handler)
        return made

    add = command("doctor", _doctor, "what this machine can prove, gate by gate, and why not").add_argument
    add("--root", type=Path, default=Path("/"), help="read a recorded machine below this folder")
    add("--json", action="store_true", help="topology and provenance as JSON")
    add = command("plan", _plan, "allocations, bytes, minutes and the detectable effect").add_argument
    add("experiment", nargs="*", help="experiment ids (default: all)")
    add("--experiments", action="append", metavar="PATH", help="YAML file or folder")
    add("--engine", default="auto", choices=("auto", "cpu", "cuda"))
    add("--backend", default="reference")
    add("--candidate")
    add("--rows", help="rows per Engram layer, or full")
    add("--pairs", type=int, help="blocks per schedule")
    add("--seed", type=int, default=20261)
    add("--pilot", type=int, default=6, metavar="N", help="base-arm runs to estimate noise (0: none)")
    audit.add_arguments(command("audit", audit.run, "where a live server's tables lie; read-only"))
    add = command("gate", _gate, "judge result files again, offline; compare with a baseline").add_argument
    add("files", nargs="*", type=Path, metavar="FILE")
    add("--trace", type=Path, metavar="FILE", help="explain a torch.profiler trace or probe marks; gates nothing")
    add("--names", default="", help="what that engine calls things: lookup=REGEX,wait=REGEX,stream=REGEX,layers=1,14")
    add("--write-trace", type=Path, metavar="OUT", help="write the measured timelines for Perfetto")
    add("--baseline", type=Path, help="a result file whose cases must all be present")
    add("--require", metavar="B1:4,A3:1", help="gates that must be reached")
    add("--markdown", type=Path, metavar="OUT", help="render the report again, figures beside it")
    add = command("calibrate", _calibrate, "how often the rules err, by simulation").add_argument
    add("--trials", type=int, default=10_000)
    add("--seed", type=int, default=20261)
    add = command("conformance", _conformance, "engines, contract line by line; 1 if a line fails").add_argument
    add("specs", nargs="+", metavar="BACKEND", help="as --engram-backend takes it: vllm@0.33.0, reference")
    add("--engine", choices=("cpu", "cuda"), help="default: cpu where the backend has it")
    add = command("experiments", _experiments, "list or validate experiment files").add_argument
    add("action", choices=("list", "validate"))
    add("paths", nargs="*", type=Path)
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    from pytest_engram import codec, doctor, engines, provenance
    from pytest_engram.numa.topology import read_topology
    from pytest_engram.session import load_experiments, this_machine

    topology = this_machine() if arguments.root == Path("/") else read_topology(arguments.root)
    found = provenance.collect(arguments.root)
    if arguments.json:
        print(codec.encode({"topology": codec.to_builtins(topology), "provenance": found}).decode())
        return 0
    experiments = list(load_experiments().values())
    print(doctor.render(topology, found, doctor.diagnose(topology, found, experiments, engines.availability())))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from pytest_engram import forecast, session

    session.check_numbers(arguments.rows, arguments.pairs, arguments.seed)
    for line in forecast.lines(arguments):
        print(line, flush=True)
    return 0


def _gate(arguments: argparse.Namespace) -> int:
    from pytest_engram.report import trace
    from pytest_engram.report.records import read_results
    from pytest_engram.report.results import gate_results
    from pytest_engram.session import load_experiments, parse_requirements

    judging = arguments.write_trace or arguments.require or arguments.baseline or arguments.markdown
    if not arguments.files and (judging or not arguments.trace):
        raise UsageError("nothing to judge", code="no-results", expected="result files, or --trace FILE")
    if arguments.trace:
        print("\n".join(trace.report(arguments.trace, arguments.names)))
    if not arguments.files:
        return 0
    found = read_results(arguments.files)
    if arguments.write_trace:
        print(trace.write(arguments.write_trace, found))
    known = dict.fromkeys((*load_experiments(), *(one.experiment for one in found)))
    require = parse_requirements(arguments.require, known)
    _, code, lines = gate_results(found, arguments.baseline, require, markdown=arguments.markdown)
    print("\n".join(lines))
    return code


def _calibrate(arguments: argparse.Namespace) -> int:
    from pytest_engram import calibration

    if arguments.trials < 1 or arguments.seed < 0:
        raise UsageError(f"{arguments.trials} trials, seed {arguments.seed}", expected="one trial or more, seed from 0")
    print(calibration.render(calibration.table(trials=arguments.trials, seed=arguments.seed)))
    return 0


def _conformance(arguments: argparse.Namespace) -> int:
    from pytest_engram.backends import load_backend
    from pytest_engram.report.conformance import conformance, failed, render

    columns = conformance([load_backend(spec) for spec in arguments.specs], engine=arguments.engine)
    print(render(columns), end="")
    return int(failed(columns))


def _experiments(arguments: argparse.Namespace) -> int:
    from pytest_engram.session import load_experiments

    for known in load_experiments(arguments.paths).values():
        print(f"{known.id:6} {known.claim.value:13} {known.variable:10} {known.title}")
        if arguments.action == "list":
            print("       " + ", ".join(f"{arm}: {settings}" for arm, settings in known.arms.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
