"""What was found before: schedules with their measurements, in one SQLite file a user.

A record belongs to a nest (dilation, strides, layout, dtype and epilogue are in its key), a
target, a number of threads, a machine and a generator version; another machine's is a miss. It
holds the list of actions and the posterior of log(anchor / candidate): count, mean, variance.
Never machine code: what is looked up is generated and verified anew. Beside the records lie the
rates that machines were found to reach at most (`looptune.roofline`).

A file that is not looptune's is never touched; one of its own that is corrupt is moved aside.

Many processes may share the file. Writes are single transactions that begin with the lock, so a
process killed in the middle leaves nothing; a connection is never carried over a fork. Where the
file cannot be had, the database lives in memory and says so once.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from looptune.errors import DatabaseError, ScheduleError
from looptune.host import fingerprint
from looptune.ir import Nest
from looptune.lower import GENERATOR_VERSION
from looptune.measure import Posterior
from looptune.schedule import Action, Schedule, replay
from looptune.serial import actions_from_json
from looptune.target import Target

SCHEMA = 1
APPLICATION = 0x6C6F6F70  # "loop", at byte 68 of the file, where SQLite keeps what it belongs to
MAGIC = b"SQLite format 3\0"
FILE = "looptune.sqlite3"
BUSY_SECONDS = 10.0
LONGEST_LINE = 1 << 16
LARGEST_GAIN = 64.0  # of a logarithm: no kernel is so much faster, and its exponential is finite
MOST_THREADS = 1 << 16
EXACT = 1 << 53  # whole numbers up to it are floats, too
logger = logging.getLogger("looptune")

TABLE = """
CREATE TABLE IF NOT EXISTS schedules (
    nest TEXT NOT NULL, target TEXT NOT NULL, threads INTEGER NOT NULL, machine TEXT NOT NULL,
    generator INTEGER NOT NULL, identity TEXT NOT NULL, actions TEXT NOT NULL,
    n INTEGER NOT NULL, mean REAL NOT NULL, variance REAL NOT NULL, created REAL NOT NULL,
    PRIMARY KEY (nest, target, threads, machine, generator, identity)
) WITHOUT ROWID
"""
RATES = """
CREATE TABLE IF NOT EXISTS rates (
    machine TEXT NOT NULL, target TEXT NOT NULL, threads INTEGER NOT NULL, kind TEXT NOT NULL,
    rate REAL NOT NULL, PRIMARY KEY (machine, target, threads, kind)
) WITHOUT ROWID
"""
COLUMNS = (
    "nest", "target", "threads", "machine", "generator", "identity", "actions", "n", "mean",
    "variance", "created",
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """What a record is for."""

    nest: str
    target: str
    threads: int
    machine: str
    generator: int = GENERATOR_VERSION


@dataclass(frozen=True)
class Record:
    """A schedule and how much faster than its anchor it was: `n` samples of the logarithm.

    `identity` is the schedule's. `variance` is that of a sample, not of the mean.
    """

    key: Key
    identity: str
    actions: tuple[Action, ...]
    n: int
    mean: float
    variance: float
    created: float = 0.0

    @property
    def posterior(self) -> Posterior:
        """Of the gain over the anchor."""
        return Posterior(self.n, self.mean, self.variance)

    def merged(self, other: Record) -> Record:
        """The record of both's samples."""
        created = max(self.created, other.created)
        return replace(self, **asdict(self.posterior.merged(other.posterior)), created=created)

    def fuller(self, other: Record) -> Record:
        """The record of more samples; of equally many this one."""
        return other if other.n > self.n else self


def key_of(nest: Nest, target: Target, threads: int) -> Key:
    """The key of a nest on this machine."""
    return Key(nest.key, target.name, threads, fingerprint().digest)


def cache_directory() -> Path:
    """LOOPTUNE_CACHE_DIR, or looptune in XDG_CACHE_HOME or ~/.cache.

    Raises `DatabaseError` where no home is known.
    """
    if chosen := os.environ.get("LOOPTUNE_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "looptune"
    try:
        return Path.home() / ".cache" / "looptune"
    except RuntimeError as reason:
        raise DatabaseError(f"no cache directory: {reason}; set LOOPTUNE_CACHE_DIR") from None


def check_directory(directory: Path) -> None:
    """Make the directory, private; raises `DatabaseError` if it is another user's or no use."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as reason:
        raise DatabaseError(f"the cache directory cannot be made: {reason}") from reason
    if found.st_uid != os.geteuid():
        raise DatabaseError(f"the cache directory {directory} belongs to another user")
    if not stat.S_ISDIR(found.st_mode) or not os.access(directory, os.W_OK | os.X_OK):
        raise DatabaseError(f"the cache directory {directory} is not writable")


class Database:
    """Records in a file, or with `path=None` in memory, for as long as the object lives.

    Raises `DatabaseError` if the file cannot be opened or is not looptune's. A corrupt one of its
    own is moved aside.
    """

    def __init__(self, path: Path | str | None) -> None:
        self.path = None if path is None else Path(path)
        self.lock = threading.RLock()
        self.owner = -1
        self.handle: sqlite3.Connection | None = None
        self.connection()

    def connection(self) -> sqlite3.Connection:
        """This process's connection; one from before a fork is left alone, not closed."""
        with self.lock:
            if self.handle is None or (self.path is not None and self.owner != os.getpid()):
                with self.told():
                    self.handle = self.opened()
                self.owner = os.getpid()
            return self.handle

    def opened(self) -> sqlite3.Connection:
        """A new connection to a database that is sound."""
        if self.path is None:
            return prepared(":memory:")
        check_ours(self.path)
        try:
            return prepared(str(self.path))
        except (sqlite3.OperationalError, OSError) as reason:
            if getattr(reason, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY:  # for now
                raise DatabaseError(f"{self.path}: {reason}") from reason
            if starts_as_database(self.path):
                return for_reading(self.path, reason)
            set_aside(self.path, str(reason))
        except sqlite3.DatabaseError as reason:
            set_aside(self.path, str(reason))
        return prepared(str(self.path))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Let a `DatabaseError` say of which file SQLite says what it says."""
        try:
            yield
        except (sqlite3.Error, OSError) as reason:
            raise DatabaseError(f"{self.path or 'the database in memory'}: {reason}") from reason

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, the lock held from the start."""
        with self.lock, self.told():
            handle = self.connection()
            handle.execute("BEGIN IMMEDIATE")
            try:
                yield handle
            except BaseException:
                if handle.in_transaction:  # a full disk has ended it already
                    handle.execute("ROLLBACK")
                raise
            handle.execute("COMMIT")

    def records(self, key: Key | None = None) -> list[Record]:
        """All records, or those of a key, the best first: by what their gain is at least."""
        query = f"SELECT {', '.join(COLUMNS)} FROM schedules"
        values: tuple[object, ...] = ()
        if key is not None:
            query += " WHERE nest=? AND target=? AND threads=? AND machine=? AND generator=?"
            values = (key.nest, key.target, key.threads, key.machine, key.generator)
        with self.lock, self.told():
            rows = self.connection().execute(query, values).fetchall()
        found = [record for record in map(sound, rows) if record is not None]
        return sorted(found, key=lambda each: (-each.posterior.lower, each.identity))

    def best(self, key: Key) -> Record | None:
        """The record of a key that is surely fastest; None if none is faster than the anchor."""
        leader = next(iter(self.records(key)), None)
        return leader if leader is not None and leader.posterior.verdict == "faster" else None

    def add(self, records: Iterable[Record]) -> int:
        """Merge new samples into what is known, in one transaction; how many records."""
        return self.combine(records, Record.merged)

    def take(self, records: Iterable[Record]) -> int:
        """Take over another database's records, in one transaction; how many.

        Of two for one schedule that with more samples stays: they may be the same ones.
        """
        return self.combine(records, Record.fuller)

    def combine(self, records: Iterable[Record], join: Callable[[Record, Record], Record]) -> int:
        """Put records in, joined to those there are for the same schedule."""
        count = 0
        with self.transaction() as handle:
            for record in records:
                values = row_of(record)
                place = tuple(values[name] for name in COLUMNS[:6])
                row = handle.execute(
                    f"SELECT {', '.join(COLUMNS)} FROM schedules WHERE nest=? AND target=? AND "
                    "threads=? AND machine=? AND generator=? AND identity=?",
                    place,
                ).fetchone()
                old = None if row is None else sound(row)
                if old is not None:
                    values = row_of(join(old, record))
                marks = ", ".join("?" * len(COLUMNS))
                handle.execute(
                    f"INSERT OR REPLACE INTO schedules VALUES ({marks})",
                    tuple(values[name] for name in COLUMNS),
                )
                count += 1
        return count

    def keep_rates(
        self, machine: str, target: str, threads: int, rates: Mapping[str, float]
    ) -> None:
        """Keep what a machine can do at most, by kind, instead of what was kept before."""
        place = (machine, target, threads)
        with self.transaction() as handle:
            handle.execute("DELETE FROM rates WHERE machine=? AND target=? AND threads=?", place)
            handle.executemany(
                "INSERT INTO rates VALUES (?, ?, ?, ?, ?)",
                [(*place, kind, rate) for kind, rate in rates.items()],
            )

    def rates(self, machine: str, target: str, threads: int) -> dict[str, float]:
        """What a machine can do at most, by kind; nothing where that was not kept."""
        query = "SELECT kind, rate FROM rates WHERE machine=? AND target=? AND threads=?"
        with self.lock, self.told():
            found = dict(self.connection().execute(query, (machine, target, threads)))
        for kind, rate in found.items():
            if not isinstance(kind, str) or type(rate) is not float or not 0 < rate < math.inf:
                logger.warning("the database's rates are no use: %r is %r", kind, rate)
                return {}
        return found

    def prune(self, *, machine: str | None = None, older_than: float | None = None) -> int:
        """Delete the records of other generator versions, of machines but this (their rates, too),
        or from before a time (seconds since the epoch); how many records."""
        clauses = ["generator<>?"]
        values: list[object] = [GENERATOR_VERSION]
        if machine is not None:
            clauses.append("machine<>?")
            values.append(machine)
        if older_than is not None:
            clauses.append("created<?")
            values.append(older_than)
        with self.transaction() as handle:
            if machine is not None:
                handle.execute("DELETE FROM rates WHERE machine<>?", (machine,))
            return handle.execute(
                f"DELETE FROM schedules WHERE {' OR '.join(clauses)}", values
            ).rowcount

    def close(self) -> None:
        """Close this process's connection."""
        with self.lock:
            if self.handle is not None and self.owner == os.getpid():
                self.handle.close()
            self.handle = None


def prepared(name: str) -> sqlite3.Connection:
    """A connection with its settings, the table made, and the schema known."""
    handle = sqlite3.connect(
        name, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    handle.text_factory = lenient
    try:
        (version,) = handle.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA):
            raise DatabaseError(f"{name} has schema {version}; this version reads {SCHEMA}")
        (state,) = handle.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        if version == 0:  # before the journal is changed, so that the file itself says whose it is
            handle.execute(f"PRAGMA application_id={APPLICATION}")
        if name != ":memory:":
            os.chmod(name, 0o600)
            (mode,) = handle.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":  # some file systems cannot
                handle.execute("PRAGMA journal_mode=DELETE")
        handle.execute(TABLE)
        handle.execute(RATES)
        handle.execute(f"PRAGMA user_version={SCHEMA}")
    except BaseException:
        handle.close()
        raise
    return handle


def lenient(text: bytes) -> str:
    """A text of the file, which may hold anything."""
    return text.decode("utf-8", "replace")


def for_reading(path: Path, reason: Exception) -> sqlite3.Connection:
    """A connection to a database that cannot be written, as on a read-only mount.

    Raises `DatabaseError` where it cannot be read, either. What lies beside it, in a journal that
    cannot be played back, is not seen.
    """
    for how in ("mode=ro", "mode=ro&immutable=1"):
        try:
            handle = sqlite3.connect(
                f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_SECONDS,
                isolation_level=None, check_same_thread=False,
            )  # fmt: skip
        except sqlite3.Error:
            continue
        handle.text_factory = lenient
        try:
            if handle.execute("PRAGMA user_version").fetchone() == (SCHEMA,):
                logger.warning("%s cannot be written (%s): it is only read", path, reason)
                return handle
        except sqlite3.Error:
            pass
        handle.close()
    raise DatabaseError(f"{path}: {reason}") from reason


def header(path: Path) -> bytes:
    """The first 100 bytes of a file, which SQLite calls its header; none if there is no file."""
    try:
        with path.open("rb") as file:
            return file.read(100)
    except OSError:
        return b""


def starts_as_database(path: Path) -> bool:
    """Whether a file is SQLite's by its header, or may become so: absent or empty."""
    found = header(path)
    return not found or found.startswith(MAGIC)


def check_ours(path: Path) -> None:
    """Raise `DatabaseError` for a file that is neither looptune's nor new.

    Its own name, in the directory that is its own, is enough: what lies there may be corrupt.
    """
    found = header(path)
    ours = found.startswith(MAGIC) and found[68:72] == APPLICATION.to_bytes(4, "big")
    if found and not ours and path.name != FILE:
        raise DatabaseError(
            f"{path} is no database of looptune's: it is left as it is (`looptune db import` reads "
            "exported lines)"
        )


def set_aside(path: Path, reason: str) -> None:
    """Move a corrupt file away, with its journal, unless another process has done so already."""
    with open(path.with_name(path.name + ".looptune-lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as handle:
                if handle.execute("PRAGMA quick_check(1)").fetchone() == ("ok",):
                    return
        except sqlite3.DatabaseError:
            pass
        stamp = f"corrupt-{time.time_ns()}"
        for suffix in ("", "-wal", "-shm"):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(part.with_name(f"{part.name}.{stamp}"))
        logger.warning("%s is corrupt (%s); moved to %s.%s", path, reason, path.name, stamp)


def record_of(row: Mapping[str, Any]) -> Record:
    """A record from its columns; raises `DatabaseError` for values that no record has."""
    check_row(row)
    key = Key(row["nest"], row["target"], row["threads"], row["machine"], row["generator"])
    try:
        actions = actions_from_json(json.loads(row["actions"]))
    except (TypeError, ValueError, RecursionError) as reason:  # of JSON, or a SerialError
        raise DatabaseError(f"a record: {reason}") from reason
    return Record(
        key, row["identity"], actions,
        row["n"], row["mean"], row["variance"], row["created"],
    )  # fmt: skip


def sound(row: Sequence[object]) -> Record | None:
    """The record of a row; None, with a warning, for one that somebody else has made of it."""
    try:
        return record_of(dict(zip(COLUMNS, row, strict=True)))
    except DatabaseError as reason:
        logger.warning("a record of the database is no use: %s", reason)
        return None


def check_row(row: Mapping[str, Any]) -> None:
    """Raise `DatabaseError` unless a record's values are of the kinds and sizes they must have."""
    for name in ("nest", "target", "machine", "identity"):
        if not isinstance(row[name], str) or not encodable(row[name]):
            raise DatabaseError(f"{name} is {row[name]!r:.80}; a text would do")
    for name in ("threads", "generator", "n"):
        if type(row[name]) is not int:
            raise DatabaseError(f"{name} is {row[name]!r:.80}; a whole number would do")
    for name in ("threads", "generator", "n", "mean", "variance", "created"):
        value = row[name]
        if type(value) not in (int, float) or not -EXACT < value < EXACT:
            raise DatabaseError(f"{name} is {value!r:.80}; a number within {EXACT} would do")
    if row["n"] < 1 or row["threads"] < 1 or row["variance"] < 0:
        raise DatabaseError("n, threads or variance is negative, or n or threads 0")
    if row["threads"] > MOST_THREADS:
        raise DatabaseError(f"threads is {row['threads']}; at most {MOST_THREADS} would do")
    if abs(row["mean"]) > LARGEST_GAIN:
        raise DatabaseError(f"mean is {row['mean']!r}; at most {LARGEST_GAIN} would do")


def encodable(text: str) -> bool:
    """Whether a text is one of Unicode: JSON may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def row_of(record: Record) -> dict[str, Any]:
    """A record's columns."""
    values = {**asdict(record.key), **asdict(record)}
    values["actions"] = json.dumps(record.actions)
    return {name: values[name] for name in COLUMNS}


def exported(database: Database) -> Iterator[str]:
    """All records, a JSON object a line."""
    for record in sorted(database.records(), key=lambda r: (asdict(r.key).items(), r.identity)):
        row = row_of(record)
        yield json.dumps({"schema": SCHEMA, **row, "actions": list(record.actions)})


def imported(lines: Iterable[str]) -> Iterator[Record]:
    """Records from exported lines; raises `DatabaseError` with the line's number.

    Their schedules are generated and verified before they are used, as all are.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield parsed(line)
        except (DatabaseError, ValueError, KeyError, TypeError, RecursionError) as reason:
            raise DatabaseError(f"line {number}: {type(reason).__name__}: {reason}") from None


def parsed(line: str) -> Record:
    """The record in a line, its values of the kinds and sizes that they must have."""
    if len(line) > LONGEST_LINE:
        raise DatabaseError(f"{len(line)} characters; at most {LONGEST_LINE} are read")
    row = json.loads(line)
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        raise DatabaseError(f"no record of schema {SCHEMA}")
    return record_of({**row, "actions": json.dumps(row["actions"])})


def schedule_of(nest: Nest, record: Record) -> Schedule | None:
    """The record's schedule of the nest; None if its actions lead elsewhere or nowhere."""
    try:
        schedule = replay(nest, record.actions)
    except ScheduleError as reason:
        logger.warning("a record of the database does not apply: %s", reason)
        return None
    return schedule if schedule.identity == record.identity else None


_default: dict[Path | None, Database] = {}
_warned: set[str] = set()


def user_file() -> Path:
    """The user's database, its directory made and private; raises `DatabaseError`."""
    check_directory(cache_directory())
    return cache_directory() / FILE


def default_exists() -> bool:
    """Whether the user has a database, in a file or in this process's memory."""
    try:
        path = cache_directory() / FILE
    except DatabaseError:
        return None in _default
    if path in _default or path.is_file():
        return True
    chosen = os.environ.get("LOOPTUNE_CACHE_DIR")
    if chosen and (reason := unusable(chosen)):
        warn_once(reason)
    return False


@lru_cache(maxsize=1)
def unusable(chosen: str) -> str:
    """Why a directory that was asked for can hold no database; nothing where it can.

    It is not made before there is a record: a folder beside it is, for a moment.
    """
    place = Path(chosen).absolute()
    there = next(each for each in (place, *place.parents) if os.path.lexists(each))
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as reason:
        return f"LOOPTUNE_CACHE_DIR={chosen} can hold no database ({reason.strerror})"
    return ""


def warn_once(reason: str) -> None:
    """Say once for a directory why what is found will not outlive the process."""
    about = os.environ.get("LOOPTUNE_CACHE_DIR") or reason
    if about not in _warned:
        _warned.add(about)
        logger.warning("%s; what is found is kept in memory only", reason)


def default_database() -> Database:
    """The user's database; in memory, with one warning, where its file cannot be had."""
    try:
        path: Path | None = cache_directory() / FILE
        if path in _default:
            return _default[path]
        database = Database(user_file())
    except DatabaseError as reason:
        warn_once(str(reason))
        path = None
        database = _default.get(None) or Database(None)
    _default[path] = database
    return database
