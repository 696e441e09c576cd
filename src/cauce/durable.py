"""Names and bytes that outlive a loss of power: a file is there after one only if it was synced, and so was its folder.

What has to be durable, and in which order, is decided by those who write: the journal, checkpoints, the stages.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """The folder and those above it, each with its name on the disk; folders that are there are left alone."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
