"""Files written so that a full disk or an interrupt costs nothing that was there before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

StrPath = str | os.PathLike[str]


@contextmanager
def replaced(path: StrPath) -> Iterator[IO[bytes]]:
    """A file to write to, which is `path` in the end: complete, or as it was before."""
    place = os.path.realpath(path)
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(place), delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.chmod(file.name, mode_of(place))
            os.replace(file.name, place)
        except BaseException:
            os.unlink(file.name)
            raise


def mode_of(path: StrPath) -> int:
    """The permissions of a file; where there is none, those of a shared one."""
    try:
        return os.stat(path).st_mode & 0o777
    except FileNotFoundError:
        return 0o644


def write_text(path: StrPath, text: str) -> None:
    """Make a file hold just this text; raises an `OSError` that names it, and then it is as it was.

    What cannot be replaced, a device, a pipe or where our own output goes, is written to.
    """
    with named(path):
        if is_stream(path):
            with open(path, "a", encoding="utf-8") as stream:
                stream.write(text)
            return
        with replaced(path) as file:
            file.write(text.encode())


def append_text(path: StrPath, text: str) -> None:
    """Write at the end of a file; raises an `OSError` that names it."""
    with named(path), open(path, "a", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def named(path: StrPath) -> Iterator[None]:
    """Let what the system says name the file that is meant."""
    try:
        yield
    except OSError as reason:
        raise type(reason)(reason.errno, reason.strerror, os.fspath(path)) from reason


def is_stream(path: StrPath) -> bool:
    """Whether a path is no ordinary file, or one that our standard output or error goes to."""
    if not os.path.exists(path):
        return False
    found = os.stat(path)
    return not os.path.isfile(path) or any(os.path.samestat(found, own) for own in own_streams())


def own_streams() -> Iterator[os.stat_result]:
    """What the standard output and error are open on."""
    for descriptor in (1, 2):
        try:
            yield os.fstat(descriptor)
        except OSError:  # closed
            continue


def same(one: StrPath, other: StrPath) -> bool:
    """Whether two paths mean one file, there or not; devices and pipes may be shared."""
    if os.path.exists(one) and os.path.exists(other):
        return Path(one).is_file() and os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)
