"""`looptune db`: what the database holds, and ways to carry it elsewhere."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from looptune.database import (
    FILE,
    Database,
    Record,
    cache_directory,
    exported,
    imported,
    user_file,
)
from looptune.errors import ArgumentError, DatabaseError
from looptune.files import same, write_text
from looptune.host import fingerprint

Answer = tuple[dict[str, object], str]
DAY = 86_400.0
WRITERS = ("import", "merge")  # which make a database where there is none


def add_jobs(job: argparse.ArgumentParser, parents: list[argparse.ArgumentParser]) -> None:
    """The subcommands, each with the options of all."""
    jobs = job.add_subparsers(dest="what", required=True, metavar="WHAT")
    jobs.add_parser("info", parents=parents, help="where it lies and what it counts")
    jobs.add_parser("list", parents=parents, help="its records, the best of each key first")
    one = jobs.add_parser("export", parents=parents, help="write records, one JSON object a line")
    one.add_argument("file", help="a file, or - for the standard output")
    one = jobs.add_parser("import", parents=parents, help="read records that export wrote")
    one.add_argument("file", type=Path)
    one = jobs.add_parser("merge", parents=parents, help="take over another database's records")
    one.add_argument("file", type=Path)
    help_text = "delete records of other generator versions, and more where asked"
    one = jobs.add_parser("prune", parents=parents, help=help_text)
    one.add_argument("--other-machines", action="store_true", help="and those of other machines")
    one.add_argument("--older-than", type=days, default=None, metavar="DAYS", help="and older ones")


def days(text: str) -> float:
    """A finite number of days, at least 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days of at least 0")
    return found


def check_apart(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` where a job would write its result over what it reads or keeps."""
    reads = {name: getattr(args, name, None) for name in ("file", "suite", "policy")}
    writes = {"--output": getattr(args, "output", None)}
    if args.job == "db" and args.what == "export":
        writes["FILE"] = reads.pop("file")
    for name, path in writes.items():
        if path is None or path == "-":
            continue
        if any(same(path, part) for part in database_files(args)):
            raise ArgumentError(f"{name} {path} is the database itself; another file would do")
        for other, source in {**reads, **writes}.items():
            if other != name and source is not None and same(path, source):
                raise ArgumentError(f"{name} {path} is {other}, too; another file would do")


def database_files(args: argparse.Namespace) -> list[Path]:
    """The database that a job uses, if any, and its journals."""
    if getattr(args, "database", None) is None:
        return []
    try:
        own = args.database == "default"
        path = cache_directory() / FILE if own else Path(args.database)
    except DatabaseError:
        return []
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]


def database_of(args: argparse.Namespace) -> Database:
    """The database that the options name, an empty one for none.

    Raises `DatabaseError` where there is none to be read, or it cannot be had.
    """
    if args.what in WRITERS:  # before there is a database, which a bad file is not to leave
        args.records = SOURCES[args.what](args.file)
    if args.database is None:
        return Database(None)
    if args.database == "default":
        return Database(user_file())
    if args.what not in WRITERS:
        check_file(Path(args.database))
    return Database(args.database)


def check_file(path: Path) -> None:
    """Raise `DatabaseError` unless there is such a file."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no file"
        raise DatabaseError(f"{path} is {what}; the file of a database would do")


def info(args: argparse.Namespace, database: Database) -> Answer:
    """Path, size and counts."""
    records = database.records()
    here = fingerprint().digest
    size = database.path.stat().st_size if database.path is not None else 0
    result: dict[str, object] = {
        "schema": 1,
        "path": None if database.path is None else str(database.path),
        "bytes": size,
        "records": len(records),
        "nests": len({record.key.nest for record in records}),
        "this_machine": sum(record.key.machine == here for record in records),
        "machines": dict(Counter(record.key.machine for record in records)),
        "generators": dict(Counter(str(record.key.generator) for record in records)),
    }
    return result, "\n".join(f"{k}: {v}" for k, v in result.items() if k != "schema")


def listing(args: argparse.Namespace, database: Database) -> Answer:
    """Every record in a line."""
    records = database.records()
    rows = [
        f"{r.key.nest[:12]} {r.key.target:8s} {r.key.threads:3d} {r.key.machine} "
        f"{100 * math.expm1(r.mean):+6.1f} % +- {100 * r.posterior.half_width:4.1f} "
        f"({r.n} samples)"
        for r in records
    ]
    head = "nest         target   thr machine      gain over the default, half of its 95 % interval"
    result: dict[str, object] = {
        "schema": 1,
        "records": [
            {
                "nest": r.key.nest, "target": r.key.target, "threads": r.key.threads,
                "machine": r.key.machine, "generator": r.key.generator, "n": r.n,
                "mean": r.mean, "variance": r.variance, "actions": r.actions,
            }
            for r in records
        ],
    }  # fmt: skip
    return result, "\n".join([head, *rows])


def export(args: argparse.Namespace, database: Database) -> Answer:
    """All records to a file or the standard output."""
    lines = list(exported(database))
    if args.file == "-":
        sys.stdout.writelines(line + "\n" for line in lines)
    else:
        try:
            write_text(args.file, "".join(line + "\n" for line in lines))
        except OSError as reason:
            raise DatabaseError(
                f"{args.file} cannot be written: {reason.strerror}; a path in a folder that is "
                "there would do, or - for the standard output"
            ) from reason
    text = "" if args.file == "-" else f"{len(lines)} records written to {args.file}"
    return {"schema": 1, "exported": len(lines)}, text


def from_lines(file: Path) -> list[Record]:
    """Records of an exported file: all of them, or with a bad line none."""
    try:
        with file.open(encoding="utf-8") as lines:
            return list(imported(lines))
    except (OSError, UnicodeDecodeError, DatabaseError) as reason:
        said = reason.strerror if isinstance(reason, OSError) else reason
        raise DatabaseError(
            f"{file}: {said}; a file that `looptune db export` wrote would do"
        ) from reason


def from_database(file: Path) -> list[Record]:
    """Another database's records."""
    check_file(file)
    other = Database(file)
    try:
        return other.records()
    finally:
        other.close()


SOURCES: dict[str, Callable[[Path], list[Record]]] = {
    "import": from_lines,
    "merge": from_database,
}


def take(args: argparse.Namespace, database: Database) -> Answer:
    """The records of an exported file."""
    count = database.take(args.records)
    return {"schema": 1, "imported": count}, f"{count} records imported"


def merge(args: argparse.Namespace, database: Database) -> Answer:
    """The records of another database."""
    count = database.take(args.records)
    return {"schema": 1, "merged": count}, f"{count} records merged"


def prune(args: argparse.Namespace, database: Database) -> Answer:
    """What is of no use here."""
    count = database.prune(
        machine=fingerprint().digest if args.other_machines else None,
        older_than=None if args.older_than is None else time.time() - DAY * args.older_than,
    )
    return {"schema": 1, "deleted": count}, f"{count} records deleted"


JOBS: dict[str, Callable[[argparse.Namespace, Database], Answer]] = {
    "info": info,
    "list": listing,
    "export": export,
    "import": take,
    "merge": merge,
    "prune": prune,
}
