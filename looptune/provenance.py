"""Where this code comes from: what results and checkpoints say of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import looptune


def commit(root: Path | None = None) -> str:
    """The commit of the source checkout, `+` after it where files differ from it; the installed
    version where there is no checkout, or no git."""
    place = Path(looptune.__file__).parents[1] if root is None else root
    if not (place / ".git").exists():
        return looptune.__version__
    try:
        found = git(place, "rev-parse", "HEAD")
        changed = git(place, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return looptune.__version__
    return found + "+" * bool(changed)


def git(place: Path, *words: str) -> str:
    """What a git command prints."""
    command = ["git", "-C", str(place), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
