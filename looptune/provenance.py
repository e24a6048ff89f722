"""Where this code comes from: what results and checkpoints say of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]  # the checkout, or where packages are installed


def commit(root: Path = ROOT) -> str:
    """The commit of the source checkout, `+` after it where files differ from it; the installed
    version where there is no checkout, or no git."""
    from looptune import __version__

    if not (root / ".git").exists():
        return __version__
    try:
        found = git(root, "rev-parse", "HEAD")
        changed = git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return found + "+" * bool(changed)


def git(place: Path, *words: str) -> str:
    """What a git command prints."""
    command = ["git", "-C", str(place), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
