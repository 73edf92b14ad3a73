"""The private folder through which the HTTP process and the schedulers talk.

    control.json              what the HTTP process wants: {"arm": {...} or null}; written atomically
    RANK/status.json          what a scheduler says of itself
    RANK/ARM/...              what it recorded while armed with that id: events.jsonl, shards, parameters.json

The folder's mode is 0700. Its path and the re-prefill nonce reach the schedulers through the environment,
which the main process sets before it starts them, so that all ranks of a node agree and no outsider knows
the nonce.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from eaglelab.capture import write_json

FOLDER, NONCE = "EAGLELAB_SPOOL", "EAGLELAB_NONCE"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def create() -> Path:
    """Make this server's spool; it goes when the process ends."""
    base = Path(os.environ.get("EAGLELAB_SPOOL_DIR") or tempfile.gettempdir())
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix="eaglelab-spool-", dir=base))  # mode 0700
    lock = os.open(folder / "alive", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held until this process ends, however it ends
    os.environ[FOLDER] = str(folder)
    os.environ[NONCE] = secrets.token_hex(16)
    owner = os.getpid()
    atexit.register(lambda: remove(folder) if os.getpid() == owner else None)  # not in a forked child
    return folder


def remove(folder: Path) -> None:
    """Take the spool away, and with it the schedulers' reason to act."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in (FOLDER, NONCE):
        os.environ.pop(name, None)


def _sweep(base: Path) -> None:
    """Remove spools that a killed server left behind: nobody holds their lock."""
    for folder in base.glob("eaglelab-spool-*"):
        try:
            lock = os.open(folder / "alive", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # not ours, or just being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # alive
        finally:
            os.close(lock)


def folder() -> Path:
    return Path(os.environ[FOLDER])


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def set_control(root: Path, arm: dict[str, Any] | None) -> None:
    write_json(root / "control.json", {"arm": arm})


def statuses(root: Path) -> dict[str, dict[str, Any]]:
    """What each rank that this process can see last said."""
    found = {path.parent.name: read_json(path) for path in sorted(root.glob("*/status.json"))}
    return {rank: status for rank, status in found.items() if status}


def inside(root: Path, *names: str) -> Path | None:
    """The file that `names` lead to below `root`; None for anything that is not a plain file of ours."""
    if not all(NAME.fullmatch(name) for name in names):
        return None
    path = root.joinpath(*names)
    return path if path.is_file() and not path.is_symlink() else None
