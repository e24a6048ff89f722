"""What several subcommands take alike: kinds of arguments, and options that they share."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from looptune.files import is_stream
from looptune.ir import LARGEST
from looptune.target import TARGETS


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def extent(text: str) -> int:
    """A whole number of at least 0 that can be a size in memory."""
    if not text.isdecimal() or len(text) > 19 or int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to {LARGEST}")
    return int(text)


def whole(text: str) -> int:
    """A whole number of at least 0, small enough for every generator of random numbers."""
    if not text.isdecimal() or len(text) > 10 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to {2**32 - 1}")
    return int(text)


def seconds(text: str) -> float:
    """A finite number of seconds, at least 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return found


def side(text: str) -> int | tuple[int, ...] | str:
    """Padding of a dimension: a number, `before,after`, or torch's `same` and `valid`."""
    if text in ("same", "valid"):
        return text
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if len(found) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is no number, BEFORE,AFTER, same or valid")
    return found[0] if len(found) == 1 else found


def listed(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(word for word in text.split(",") if word)


def many_seconds(text: str) -> tuple[float, ...]:
    """Numbers of seconds between commas."""
    found = tuple(seconds(word) for word in listed(text))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no number of seconds")
    return found


def output_file(text: str) -> Path:
    """A file that can be written, so that the work is not lost at its end."""
    path = Path(text)
    if path.exists() and is_stream(path) and not path.is_dir():
        return path
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is read-only")
    return path


def database_option() -> argparse.ArgumentParser:
    """The database of a job; None for none."""
    options = argparse.ArgumentParser(add_help=False)
    help_text = "a file, or none; default: the user's"
    options.add_argument("--database", type=path_or_none, default="default", metavar="PATH",
                         help=help_text)  # fmt: skip
    return options


def path_or_none(text: str) -> str | None:
    """A path, or none."""
    return None if text == "none" else text


def target_option() -> argparse.ArgumentParser:
    """`--target`."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--target", choices=sorted(TARGETS), help="default: the host's widest")
    return options


def threads_option() -> argparse.ArgumentParser:
    """`--threads`; None for what the environment says."""
    options = argparse.ArgumentParser(add_help=False)
    help_text = "of a kernel; default: LOOPTUNE_NUM_THREADS, OMP_NUM_THREADS or 1"
    options.add_argument("--threads", type=count, default=None, help=help_text)
    return options


def output_options() -> argparse.ArgumentParser:
    """`--json` and `--output`."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--json", action="store_true", help="print JSON instead of text")
    help_text = "write the JSON to this file"
    options.add_argument("--output", type=output_file, default=None, help=help_text)
    return options
