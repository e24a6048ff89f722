"""The command line: one subcommand a job. Results on stdout, progress on stderr.

Exit codes: 0 good, 1 a finding (a wrong result, an unsupported host), 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import looptune
from looptune.bench import PEERS, BenchConfig, Comparison, bench, compared, numpy_call, render
from looptune.choose import Budget
from looptune.database import FILE, cache_directory
from looptune.dbcli import JOBS as DATABASE_JOBS
from looptune.dbcli import add_jobs, check_apart, database_of
from looptune.default import default_schedule
from looptune.dtypes import ARGUMENTS
from looptune.errors import (
    ArgumentError,
    DatabaseError,
    LooptuneError,
    NestError,
    SpecError,
    UnsupportedError,
)
from looptune.files import write_text
from looptune.host import fingerprint, host_isas, host_target, thread_count
from looptune.ir import Plan
from looptune.measure import peak_flops
from looptune.models.figures import LEGEND
from looptune.options import (
    count,
    database_option,
    extent,
    listed,
    many_seconds,
    output_file,
    output_options,
    seconds,
    side,
    target_option,
    threads_option,
    whole,
)
from looptune.roofline import keep, measure_roofline
from looptune.runtime.call import call_path
from looptune.runtime.kernel import Kernel
from looptune.search import STRATEGIES, STRATEGY
from looptune.target import TARGETS
from looptune.tune import Report, optimize, resolve_database
from looptune.tune import compile as compile_plan
from looptune.tuner import Interrupted
from looptune.usage import EXAMPLES, Parser, encoded
from looptune.workloads import batched_matmul, conv2d, einsum, fuse, gemv, matmul
from looptune.workloads.epilogue import WORDS
from looptune.workloads.suites import load

if TYPE_CHECKING:
    Jobs = argparse._SubParsersAction[argparse.ArgumentParser]

SHOWN = ("tree", "program", "asm", "explain")
NOISY = 0.1  # of a rate's spread: more tells little
SUMMED = "columns of a, what is summed over"
LETTERS = {
    "N": "images", "C": "channels of the input", "H": "its height", "W": "its width",
    "O": "channels of the result: filters", "R": "height of a filter", "S": "width of a filter",
}  # fmt: skip
TRAINED = ("seed", "stages", "share", "trainer", "runners")  # options of a run that it keeps
EXTRAS = {  # by what each brings that others do not
    "envs": ("gymnasium",),
    "train": ("torch", "torch_geometric", "ray", "gymnasium"),
    "compare": ("tvm", "llvmlite"),
    "loop_tool": ("loop_tool",),
    "notebooks": ("ipykernel", "nbclient", "matplotlib"),
    "test": ("pytest", "hypothesis", "mypy"),
}


def parser() -> argparse.ArgumentParser:
    """Every subcommand and option."""
    top: argparse.ArgumentParser = Parser(prog="looptune", description=looptune.__doc__)
    top.add_argument("--version", action="version", version=looptune.__version__)
    jobs = top.add_subparsers(dest="job", required=True, metavar="JOB")
    for add in (add_optimize, add_show, add_bench, add_peak, add_db, add_train, add_eval):
        add(jobs)
    help_text = "say what works on this machine, and what does not"
    jobs.add_parser("doctor", help=help_text, parents=[output_options()], epilog=EXAMPLES["doctor"])
    return top


def add_optimize(jobs: Jobs) -> None:
    """`optimize`, with a search's options."""
    options = argparse.ArgumentParser(add_help=False)
    help_text = f"one of {', '.join(sorted(STRATEGIES))}"
    options.add_argument("--strategy", default=STRATEGY, metavar="NAME", help=help_text)
    help_text = (
        "seconds to search for, each candidate verified and timed in a process of its own, whose "
        "start takes half a second more; default: none, nothing is measured"
    )
    options.add_argument("--budget", type=seconds, default=None, metavar="SECONDS", help=help_text)
    help_text = "candidates to measure at most"
    options.add_argument(
        "--measurements", type=count, default=None, metavar="COUNT", help=help_text
    )
    options.add_argument("--retune", action="store_true", help="search, whatever was found before")
    options.add_argument("--seed", type=whole, default=0, help="of operands and random searches")
    epilog = EXAMPLES["optimize"]
    job = jobs.add_parser("optimize", help="make, verify and time a kernel", epilog=epilog)
    add_workloads(job, [options, threads_option(), database_option(), output_options()])


def add_show(jobs: Jobs) -> None:
    """`show`."""
    options = argparse.ArgumentParser(add_help=False)
    help_text = "may be repeated; default: tree, explain"
    options.add_argument("--what", choices=SHOWN, action="append", help=help_text)
    help_text = "print a kernel's loop tree, Program or assembly"
    job = jobs.add_parser("show", help=help_text, epilog=EXAMPLES["show"])
    add_workloads(job, [options, threads_option(), database_option(), output_options()])


def add_bench(jobs: Jobs) -> None:
    """`bench`."""
    shared = [target_option(), threads_option(), output_options()]
    help_text = "time a suite of workloads against NumPy and torch"
    job = jobs.add_parser("bench", help=help_text, parents=shared, epilog=EXAMPLES["bench"])
    help_text = "a suite's name (see below), or a JSON file"
    job.add_argument("--suite", default="looptune-test", metavar="NAME", help=help_text)
    help_text = f"comma-separated, of {', '.join(PEERS)}; default: numpy"
    job.add_argument("--against", type=listed, default=("numpy",), help=help_text)
    job.add_argument("--rounds", type=count, default=15, help="interleaved rounds a workload")
    job.add_argument("--seconds", type=seconds, default=0.5, help="timing a workload, in all")


def add_peak(jobs: Jobs) -> None:
    """`peak`."""
    help_text = "measure peak FLOPS and streaming bandwidth, and keep them in the database"
    shared = [target_option(), threads_option(), database_option(), output_options()]
    jobs.add_parser("peak", help=help_text, parents=shared, epilog=EXAMPLES["peak"])


def add_db(jobs: Jobs) -> None:
    """`db`, whose jobs are `looptune.dbcli`'s."""
    help_text = "look at, carry or prune the database"
    job = jobs.add_parser("db", help=help_text, epilog=EXAMPLES["db"])
    add_jobs(job, [database_option(), output_options()])


def add_train(jobs: Jobs) -> None:
    """`train`."""
    help_text = "train a policy, from the shipped measurements to a checkpoint"
    job = jobs.add_parser("train", help=help_text, epilog=EXAMPLES["train"])
    job.add_argument("folder", type=Path, help="for the run's files; new, or with --resume")
    help_text = "of the network and of what it samples; default: 0"
    job.add_argument("--seed", type=whole, help=help_text)
    help_text = "comma-separated; default: regress,imitate,clone,model,measured, 25 minutes in all"
    job.add_argument("--stages", type=listed, help=help_text)
    help_text = "how much of every stage, of its problems, epochs and steps; default: 1, all"
    job.add_argument("--share", type=float, metavar="PART", help=help_text)
    help_text = "go on with a run that was stopped, with its settings"
    job.add_argument("--resume", action="store_true", help=help_text)
    help_text = "whose PPO: RLlib's (the default), or the one in a single file"
    job.add_argument("--trainer", choices=("rllib", "single"), help=help_text)
    help_text = "remote environment runners of RLlib; default: 0, sample in this process"
    job.add_argument("--runners", type=whole, help=help_text)
    job.add_argument("--address", help="of the Ray cluster for the runners; default: a local one")


def add_eval(jobs: Jobs) -> None:
    """`eval`."""
    help_text = "evaluate a policy on what is held out, beside what others choose"
    job = jobs.add_parser(
        "eval", help=help_text, parents=[target_option(), threads_option()],
        epilog=f"{EXAMPLES['eval']}\n\n{LEGEND}",
    )  # fmt: skip
    job.add_argument("--policy", default=None, metavar="FILE", help="default: the shipped one")
    help_text = "comma-separated, of matmul, unlike-matmul, convolution, contraction; default: all"
    job.add_argument("--sets", type=listed, default=None, help=help_text)
    job.add_argument("--most", type=count, default=None, help="shapes of a set; default: all")
    help_text = "seconds that the policy may measure for, beside none; default: 0.1"
    job.add_argument("--budgets", type=many_seconds, default=None, help=help_text)
    help_text = "seconds a shape that all searches share, to find the best known; default: 0"
    job.add_argument("--best", type=seconds, default=0.0, metavar="SECONDS", help=help_text)
    track = job.add_mutually_exclusive_group()
    help_text = "ask the cost model and time nothing; all targets unless one is named"
    track.add_argument("--model", action="store_true", help=help_text)
    track.add_argument("--measured", dest="model", action="store_false", help="the default")
    job.add_argument("--json", action="store_true", help="print JSON instead of text")
    help_text = "lines of JSON: a header, and a row a shape as it comes"
    job.add_argument("--output", type=output_file, default=None, metavar="FILE", help=help_text)
    help_text = "go on with FILE, on the same machine, with the same policy and options"
    job.add_argument("--resume", action="store_true", help=help_text)


def add_workloads(job: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]) -> None:
    """The workloads that `optimize` and `show` take, each with the job's options."""
    common = argparse.ArgumentParser(add_help=False)
    help_text = "of the operands"
    common.add_argument("--dtype", choices=ARGUMENTS, default="float32", help=help_text)
    help_text = f"what follows, steps between commas: {', '.join(WORDS)}"
    common.add_argument("--epilogue", default=None, metavar="STEPS", help=help_text)
    parents = [common, target_option(), *parents]
    kinds = job.add_subparsers(dest="kind", required=True, metavar="WORKLOAD")
    told: dict[str, Any] = {"parents": parents, "epilog": job.epilog}

    kind = kinds.add_parser("matmul", **told, help="M N K: a[m,k] b[k,n] -> out[m,n]")
    for name, help_text in {"M": "rows of a", "N": "columns of b", "K": SUMMED}.items():
        kind.add_argument(name, type=extent, help=help_text)
    kind.add_argument("--trans-a", action="store_true", help="a is stored as [k, m]")
    kind.add_argument("--trans-b", action="store_true", help="b is stored as [n, k]")
    help_text = "a stack of so many products"
    kind.add_argument("--batch", type=extent, default=None, metavar="COUNT", help=help_text)

    kind = kinds.add_parser("gemv", **told, help="M K: a[m,k] x[k] -> y[m]")
    for name, help_text in {"M": "rows of a, elements of y", "K": SUMMED}.items():
        kind.add_argument(name, type=extent, help=help_text)

    kind = kinds.add_parser("conv2d", **told, help="N C H W O R S, as in torch")
    for name, help_text in LETTERS.items():
        kind.add_argument(name, type=extent, help=help_text)
    help_text = "a number, or one a dimension; default: 1"
    kind.add_argument("--stride", type=int, nargs="+", default=[1], help=help_text)
    kind.add_argument(
        "--padding", type=side, nargs="+", default=[0], metavar="SIDE",
        help="a number, or one each for height and width; BEFORE,AFTER for each; same; valid; "
        "default: 0",
    )  # fmt: skip
    kind.add_argument("--dilation", type=int, nargs="+", default=[1], help=help_text)
    kind.add_argument("--groups", type=int, default=1, help="of channels")
    layouts = ("NCHW", "NHWC")
    kind.add_argument("--layout", choices=layouts, default="NCHW", help="of input and result")

    help_text = "SPEC label=size ...: einsum 'mk,kn->mn' m=64 k=64 n=64"
    kind = kinds.add_parser("einsum", **told, help=help_text)
    kind.add_argument("spec", help="as numpy.einsum takes it")
    kind.add_argument("sizes", nargs="*", metavar="label=size", help="the extent of each label")


def workload_plan(args: argparse.Namespace) -> Plan:
    """The plan that the command line describes, with its epilogue."""
    plan = contraction_plan(args)
    return plan if args.epilogue is None else fuse(plan, args.epilogue)


def contraction_plan(args: argparse.Namespace) -> Plan:
    """The plan that the command line describes, without an epilogue."""
    if args.kind == "matmul":
        flags = {"trans_a": args.trans_a, "trans_b": args.trans_b, "dtype": args.dtype}
        if args.batch is not None:
            return batched_matmul(args.batch, args.M, args.N, args.K, **flags)
        return matmul(args.M, args.N, args.K, **flags)
    if args.kind == "gemv":
        return gemv(args.M, args.K, dtype=args.dtype)
    if args.kind == "einsum":
        return einsum(args.spec, sizes=label_sizes(args.sizes), dtype=args.dtype)
    channels_last = args.layout == "NHWC"
    image = (args.H, args.W, args.C) if channels_last else (args.C, args.H, args.W)
    return conv2d(
        (args.N, *image),
        (args.O, args.C // max(1, args.groups), args.R, args.S),
        stride=one_or_two(args.stride),
        padding=padding_of(args.padding),
        dilation=one_or_two(args.dilation),
        groups=args.groups,
        layout=args.layout,
        dtype=args.dtype,
    )


def one_or_two(values: list[Any]) -> Any:
    """A value for both dimensions, or one each."""
    return values[0] if len(values) == 1 else tuple(values)


def padding_of(sides: list[Any]) -> Any:
    """Padding for both dimensions, or one each; raises `SpecError` for what may mean two things."""
    match sides:
        case [int() | str() as both]:
            return both
        case [int(), int()] | [tuple(), tuple()]:
            return tuple(sides)
    given = " ".join(str(side).strip("()").replace(" ", "") for side in sides)
    raise SpecError(
        f"--padding {given}: a number for both dimensions, a number or BEFORE,AFTER for each, or "
        "same or valid would do"
    )


def label_sizes(words: Sequence[str]) -> dict[str, int]:
    """`["m=64", "n=32"]` as sizes; raises `SpecError` for anything else."""
    sizes: dict[str, int] = {}
    for word in words:
        label, equals, size = word.partition("=")
        if not equals or len(label) != 1 or not re.fullmatch("[0-9]{1,19}", size):
            raise SpecError(f"{word!r} is no label=size, as in m=64")
        if label in sizes:
            raise SpecError(f"label {label!r} has two sizes, {sizes[label]} and {size}")
        sizes[label] = int(size)
    return sizes


def write(args: argparse.Namespace, result: dict[str, object], text: str) -> None:
    """Print text or JSON; write the JSON where asked, last: a full disk costs no result."""
    lines = encoded(result)
    try:
        print(lines if args.json else text, flush=True)
    finally:  # whatever becomes of one of the two, the other is there
        if args.output is not None:
            write_text(args.output, lines + "\n")


def run_optimize(args: argparse.Namespace) -> int:
    """Make, verify and time one kernel."""
    plan = workload_plan(args)
    kernel = tuned(plan, args)
    peak = peak_flops(kernel.target, plan.dtype)
    found = compared(kernel, {"numpy": partial(numpy_call, plan)}, peak)
    against_numpy = found.ratio("numpy") if kernel.flops else None
    report = kernel.report
    assert report is not None, "optimize always leaves one"
    result: dict[str, object] = {
        "schema": 1,
        "verified": report.verified,
        "origin": kernel.origin,
        "target": kernel.target.name,
        "call_path": call_path(),
        "code_bytes": len(kernel.code_bytes),
        "codegen_s": report.codegen_seconds,
        "schedule_s": report.schedule_seconds,
        "verify_s": report.verify_seconds,
        "tried": report.tried,
        "rejected": report.rejected,
        "gain": [None if c.posterior is None else c.posterior.mean for c in report.choices],
        "actions": [schedule.actions for schedule in kernel.schedules],
        "loop_tree": kernel.loop_tree,
        "gflops": found.rate / 1e9,
        "fraction_of_peak": found.fraction_of_peak,
        "vs_numpy": against_numpy,
        "spread": found.times["kernel"].spread,
    }
    text = (
        f"{kernel.loop_tree}\n\n"
        f"verified: {'yes' if report.verified else 'no'}   "
        f"{rates(found, against_numpy)}\n{searched(report)}"
        f"{kernel.target.name}, {len(kernel.code_bytes)} bytes of code made in "
        f"{1e3 * report.codegen_seconds:.2f} ms, called through {call_path()}"
    )
    write(args, result, text)
    return 0


def rates(found: Comparison, against_numpy: float | None) -> str:
    """Rate, its spread and share of the peak, and the ratio to NumPy; nothing of what computes
    nothing."""
    threads, spread = found.kernel.threads, found.times["kernel"].spread
    if not found.kernel.flops:
        return "no operations: nothing to compare"
    versus = f"{against_numpy:.2f}x NumPy" if against_numpy else "NumPy has no such call"
    return (
        f"{found.rate / 1e9:.1f} GFLOPS \N{PLUS-MINUS SIGN} {100 * spread:.0f} %"
        f"{', noisy' * (spread > NOISY)} ({found.fraction_of_peak:.0%} of the peak of "
        f"{threads} core{'s' * (threads > 1)})   {versus}"
    )


def searched(report: Report) -> str:
    """Where the schedules come from, a line a nest; nothing for the default without a search."""
    lines = []
    for choice in report.choices:
        gain = "nothing surely faster than the default"
        if choice.posterior is not None:
            gain = f"{100 * math.expm1(choice.posterior.mean):+.1f} % against the default"
        if choice.origin == "database":
            lines.append(f"from the database: {gain} (--retune searches again)\n")
        elif choice.trials:
            rejected = sum(choice.rejected.values())
            lines.append(f"{choice.origin}: {gain}, {choice.tried} tried, {rejected} rejected\n")
        elif choice.origin != "default":
            lines.append(
                f"{choice.origin}: by the cost model, {choice.tried} schedules asked for\n"
            )
    return "".join(lines)


def tuned(plan: Plan, args: argparse.Namespace) -> Kernel:
    """The kernel of the options; interrupted, that of the best schedule so far."""
    target = host_target(args.target)
    if args.strategy == "default" and (args.budget or args.measurements):
        print("looptune: the default strategy spends no budget; see --strategy", file=sys.stderr)
    try:
        return optimize(
            plan, target=target, strategy=args.strategy, threads=args.threads,
            budget=Budget(seconds=args.budget, measurements=args.measurements),
            database=args.database,
            retune=args.retune, seed=args.seed, isolate=True,
        )  # fmt: skip
    except Interrupted as stop:
        print("interrupted: the best so far", file=sys.stderr)
        best, threads = stop.schedule, thread_count(args.threads)
        schedules = [
            best if nest.key == best.nest.key else default_schedule(nest, target, threads)
            for nest in plan.nests
        ]
        return compile_plan(plan, schedules, target=target, threads=threads)


def run_show(args: argparse.Namespace) -> int:
    """Print what a kernel is made of; any target, on any machine."""
    kernel = optimize(
        workload_plan(args), target=args.target, threads=args.threads, database=args.database,
        verify=False,
    )  # fmt: skip
    parts = {
        "tree": lambda: kernel.loop_tree,
        "program": lambda: "\n".join(str(program) for program in kernel.programs),
        "asm": lambda: kernel.asm,
        "explain": lambda: str(kernel.explain()),
    }
    found: dict[str, object] = {what: parts[what]() for what in args.what or ("tree", "explain")}
    text = "\n\n".join(str(part) for part in found.values())
    about: dict[str, object] = {
        "schema": 1, "target": kernel.target.name, "threads": kernel.threads,
        "origin": kernel.origin,
    }  # fmt: skip
    head = f"schedule: {kernel.origin}, for {kernel.target.name} and {kernel.threads} thread"
    write(args, {**about, **found}, f"{head}{'s' * (kernel.threads > 1)}\n\n{text}")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """Bench a suite; exit 1 if any result was wrong."""
    for name in args.against:
        if name not in PEERS:
            raise UnsupportedError(f"--against {name!r} is none of {sorted(PEERS)}")
        if name.startswith("torch") and importlib.util.find_spec("torch") is None:
            raise UnsupportedError(
                f"--against {name}: torch is not installed; pip install -c constraints.txt torch "
                "in the checkout, or leave it out"
            )
    config = BenchConfig(
        suite=args.suite,
        against=args.against,
        threads=thread_count(args.threads),
        target=args.target,
        rounds=args.rounds,
        seconds=args.seconds,
    )
    result = {
        **bench(load(args.suite), config, host_target(args.target)),
        "looptune": looptune.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "command": args.command,
    }
    write(args, result, render(result))
    rows: list[dict[str, object]] = result["rows"]
    return 0 if all(row["correct"] for row in rows) else 1


def run_peak(args: argparse.Namespace) -> int:
    """Measure the roofline of so many threads."""
    target, threads = host_target(args.target), thread_count(args.threads)
    database = resolve_database(args.database, for_records=True)
    found = measure_roofline(target, threads)
    if database is not None:
        keep(database, found)
    flops = {dtype: rate / 1e9 for dtype, rate in found.flops.items()}
    streams = {size: rate / 1e9 for size, rate in found.bandwidth.items()}
    result: dict[str, object] = {
        "schema": 1,
        "target": target.name,
        "threads": threads,
        "gflops": flops,
        "stream_gbytes": {str(size): rate for size, rate in streams.items()},
    }
    who = "one thread" if threads == 1 else f"{threads} threads"
    lines = [f"{dtype}: {rate:.1f} GFLOPS, {who}, {target.name}" for dtype, rate in flops.items()]
    lines += [f"copy of {size >> 10} KiB: {rate:.1f} GB/s" for size, rate in streams.items()]
    write(args, result, "\n".join(lines))
    return 0


def run_db(args: argparse.Namespace) -> int:
    """One job on the database."""
    result, text = DATABASE_JOBS[args.what](args, database_of(args))
    if text or args.json or args.output is not None:
        write(args, result, text)
    return 0


def run_train(args: argparse.Namespace) -> int:
    """Train a policy."""
    try:
        from looptune.models.train import TrainConfig, resumed, run
    except ImportError as missing:
        raise UnsupportedError(
            f"training needs {missing.name}: pip install -c constraints.txt '.[train]' in the "
            "checkout brings it"
        ) from missing
    settings = {name: getattr(args, name) for name in TRAINED}
    given = {name: value for name, value in settings.items() if value is not None}
    begun = args.resume and (args.folder / "config.json").exists()
    config = resumed(args.folder, given) if begun else TrainConfig(**given)
    try:
        run(config, args.folder, args.resume, args.address)
    except KeyboardInterrupt:
        where = shlex.quote(str(args.folder))
        print(f"looptune: interrupted; looptune train {where} --resume goes on", file=sys.stderr)
        return 130
    print(args.folder / "policy.npz")
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """Evaluate a policy; exit 1 if a shape failed."""
    from looptune.models.advise import policy_of
    from looptune.models.evaluate import EvalConfig, evaluate
    from looptune.models.figures import summary, table
    from looptune.models.sets import SETS

    if args.resume and args.output is None:
        raise ArgumentError("--resume goes on with a file: name it by --output")
    if args.model and args.budgets is not None:
        raise ArgumentError("--budgets with --model: the cost model takes no time; leave it out")
    config = EvalConfig(
        sets=tuple(SETS) if args.sets is None else args.sets,
        most=args.most,
        threads=thread_count(None) if args.threads is None else args.threads,
        target=args.target,
        budgets=args.budgets or (0.1,),
        best=args.best,
        model=args.model,
    )
    header, rows = evaluate(
        config, policy_of(args.policy), args.output, resume=args.resume, command=args.command
    )
    found = summary(rows)
    result = {"header": header, "summary": found, "rows": [asdict(row) for row in rows]}
    print(encoded(result) if args.json else f"{table(found)}\n\n{LEGEND}")
    return 1 if any(row.error for row in rows) else 0


def database_place() -> str:
    """Where the user's database lies or will lie, or why there is none."""
    try:
        path = cache_directory() / FILE
    except DatabaseError as reason:
        return f"in memory only: {reason}"
    return str(path) if path.exists() else f"{path} (made by the first record)"


def is_there(module: str) -> bool:
    """Whether a module is installed."""
    return importlib.util.find_spec(module) is not None


def said(value: object) -> object:
    """A value in words."""
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else value


def run_doctor(args: argparse.Namespace) -> int:
    """Say what this machine and installation can do."""
    machine = fingerprint()
    isas = host_isas()
    result: dict[str, object] = {
        "schema": 1,
        "looptune": looptune.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": machine.cpu,
        "targets": sorted(name for name, target in TARGETS.items() if target.isa in isas),
        "default_target": host_target().name if isas else None,
        "call_path": call_path(),
        "c_compiler": next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
        "threads": thread_count(None),
        "database": database_place(),
        "extras": [name for name, modules in EXTRAS.items() if all(map(is_there, modules))],
        "source": str(Path(looptune.__file__).parent),
    }
    lines = [f"{name}: {said(value)}" for name, value in result.items() if name != "schema"]
    if call_path() != "native":
        lines.append(
            "the C extension is absent: calls go through ctypes and cost microseconds more"
        )
    if not isas:
        lines.append("no supported instruction set: kernels can be made and read, not run")
    write(args, result, "\n".join(lines))
    return 0 if isas else 1


JOBS = {
    "optimize": run_optimize,
    "show": run_show,
    "bench": run_bench,
    "peak": run_peak,
    "db": run_db,
    "train": run_train,
    "eval": run_eval,
    "doctor": run_doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job; usage errors and typed errors end with one line on stderr."""
    words = sys.argv[1:] if argv is None else list(argv)
    args, unknown = parser().parse_known_args(words)
    if unknown:
        job = " ".join(filter(None, (args.job, getattr(args, "kind", ""))))
        Parser(prog=f"looptune {job}").error(f"no such argument: {' '.join(unknown)}")
    args.command = shlex.join(["looptune", *words])
    try:
        check_apart(args)
        return JOBS[args.job](args)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (SpecError, NestError, UnsupportedError, ArgumentError) as error:
        print(f"looptune: {error}", file=sys.stderr)
        return 2
    except (LooptuneError, MemoryError, OSError) as error:
        print(f"looptune: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("looptune: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
