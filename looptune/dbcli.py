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
    Database,
    exported,
    imported,
    user_file,
)
from looptune.errors import DatabaseError
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
    one.add_argument(
        "--older-than", type=float, default=None, metavar="DAYS", help="and older ones"
    )


def database_of(args: argparse.Namespace) -> Database:
    """The database that the options name, an empty one for none.

    Raises `DatabaseError` where there is none to be read, or it cannot be had.
    """
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
            Path(args.file).write_text("".join(line + "\n" for line in lines))
        except OSError as reason:
            raise DatabaseError(
                f"{args.file} cannot be written: {reason.strerror}; a path in a folder that is "
                "there would do, or - for the standard output"
            ) from reason
    text = "" if args.file == "-" else f"{len(lines)} records written to {args.file}"
    return {"schema": 1, "exported": len(lines)}, text


def take(args: argparse.Namespace, database: Database) -> Answer:
    """Records of an exported file: all of them, or with a bad line none."""
    try:
        with args.file.open(encoding="utf-8") as lines:
            records = list(imported(lines))
    except (OSError, UnicodeDecodeError, DatabaseError) as reason:
        said = reason.strerror if isinstance(reason, OSError) else reason
        raise DatabaseError(
            f"{args.file}: {said}; a file that `looptune db export` wrote would do"
        ) from reason
    count = database.take(records)
    return {"schema": 1, "imported": count}, f"{count} records imported"


def merge(args: argparse.Namespace, database: Database) -> Answer:
    """Another database's records."""
    check_file(args.file)
    other = Database(args.file)
    count = database.take(other.records())
    other.close()
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
