"""The files that a user's list of paths and globs names."""

import glob
import os
from pathlib import Path

from repro.errors import ReproError


def find_files(patterns):
    """The regular files named by `PATH_OR_GLOB[,PATH_OR_GLOB...]`, each once, sorted by path.

    `~` is the home folder, `**` any depth of folders; a glob skips hidden names, and folders among its matches. A path
    that exists is taken as it is, with any comma, star or bracket in it.

    Raises:
      ReproError: a pattern is empty, matches no file, or is a folder or something else that is not a file.
    """
    whole = os.path.expanduser(patterns)
    found = {}
    for pattern in [whole] if os.path.exists(whole) else map(os.path.expanduser, patterns.split(",")):
        for path in _expand(pattern):
            found.setdefault(os.path.realpath(path), path)
    return sorted(map(Path, found.values()))


def _expand(pattern):
    if not pattern.strip():
        raise ReproError('A path or glob is empty: write, for example, "text:notes/**/*.txt".')
    if os.path.isdir(pattern):
        example = os.path.join(pattern, "**", "*.txt")
        raise ReproError(f'{pattern} is a folder: name the files in it with a glob, for example "{example}".')
    if os.path.lexists(pattern):
        if not os.path.isfile(pattern):
            raise ReproError(f"{pattern} is not a regular file, or is a broken link: name a file.")
        return [pattern]
    matches = glob.glob(pattern, recursive=True)
    if not matches:
        raise ReproError(f"No file matches {pattern}: check the path (relative paths start at {os.getcwd()}).")
    matched_files = [match for match in matches if os.path.isfile(match)]
    if not matched_files:
        raise ReproError(f"{pattern} matches folders only: write a glob that matches the files in them.")
    return matched_files


def list_names(paths):
    """The first three file names, and how many more there are."""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more
