"""The probe: runs inside SGLang, found through its plugin API (entry point group `sglang.srt.plugins`).

`register` is called by SGLang in every process. It acts in two kinds only: the HTTP server's main process
(which makes the private spool folder and adds the routes) and the schedulers that this process starts
(which get the hooks). Anywhere else, such as the detokenizer, an offline Engine or a tokenizer worker, it
does nothing. Nothing here may ever raise into SGLang. Of the rest of eaglelab the probe imports `capture`
and `releases`.

The server's environment may set EAGLELAB_SPOOL_DIR (where the spool goes; default: the temporary folder)
and EAGLELAB_REPREFILL_BYTES (budget of one re-prefill; default 4 GiB).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

logger = logging.getLogger("eaglelab.probe")


def role() -> str:
    """What this process is to us: "http", "scheduler" or "none"; read off the call stack that led here."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_name, os.path.basename(frame.f_code.co_filename)))
        frame = frame.f_back  # type: ignore[assignment]
    if multiprocessing.parent_process() is not None:
        return "scheduler" if any(name.startswith("run_scheduler_process") for name, _ in frames) else "none"
    return "none" if ("__init__", "engine.py") in frames else "http"


def register() -> None:
    """Entry point. Never raises: a server must start whatever happens to us."""
    try:
        here = role()
        if here == "http":
            from eaglelab.probe import routes, spool

            folder = spool.create()
            if not routes.attach():
                spool.remove(folder)
        elif here == "scheduler" and os.environ.get("EAGLELAB_SPOOL"):
            from eaglelab.probe import hooks

            hooks.register()
    except Exception:
        logger.exception("eaglelab's probe is off in this process")
