"""Whose turn it is: one report at a time on a server, so that two timers do not disturb one another.

The lock is a file on this machine, taken by the operating system's own lock (a process that dies lets go of
it). Between machines the probe says no itself: it is armed by one capture at a time.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eaglelab.errors import AttachError
from eaglelab.progress import Progress


def lock_file(server: str) -> Path:
    """The file that stands for a server, in EAGLELAB_LOCKS or a folder of this user in the temporary one."""
    named = os.environ.get("EAGLELAB_LOCKS")
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"eaglelab-locks-{getpass.getuser()}"
    return folder / f"{hashlib.sha256(server.encode()).hexdigest()[:16]}.lock"


@contextlib.contextmanager
def turn(server: str, wait: float, say: Progress) -> Iterator[None]:
    """Hold this server's lock. AttachError if another report holds it longer than `wait` seconds.

    server "" (a capture is read): nothing to wait for.
    """
    if not server:
        yield
        return
    from filelock import FileLock, Timeout

    path = lock_file(server)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait:
            say(f"another report works on {server}: waiting up to {wait:g} s")
        try:
            lock.acquire(timeout=wait)
        except Timeout:
            raise AttachError(
                f"another report works on {server} (lock {path}); wait for it with --wait SECONDS, or stop it"
            ) from None
    try:
        yield
    finally:
        lock.release()
