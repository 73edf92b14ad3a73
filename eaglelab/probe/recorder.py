"""The recorder of one scheduler: watches the control file, holds the session, says how it is.

Idle, the hooks read one attribute (`session`, None) per worker call. A thread of its own looks at the
control file's time stamp ten times a second; it also does the slow work (checksums), so the scheduler's
thread does not.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from eaglelab.capture import write_json
from eaglelab.probe import engine, parameters, reprefill, spool, staging
from eaglelab.probe.session import Arm, Session

POLL_S = 0.1


class Recorder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.session: Session | None = None
        self.worker: Any = None
        self.hooks: dict[str, bool] = {}
        self.errors: dict[str, int] = {}
        self.last_error = ""
        self.reprefill_off: str | None = "not known yet"  # the reason; None: re-prefill works here
        self._last: Session | None = None
        self._arm: Arm | None = None
        self._parameters = "not asked"
        self._stamp: tuple[int, int] | None = None
        self._said: dict[str, Any] = {}

    def failed(self, stage: str, error: Exception) -> None:
        self.errors[stage] = self.errors.get(stage, 0) + 1
        self.last_error = f"{stage}: {type(error).__name__}: {error}"

    def attach(self, worker: Any) -> None:
        """Called once, when the scheduler's draft worker has its weights."""
        if self.worker is not None:
            return
        self.worker = worker
        self.identity = engine.identity(worker)
        self.folder = self.root / self.identity.name
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.stager = staging.stager_for(engine.device_type(worker))
        threading.Thread(target=self._watch, name="eaglelab-watch", daemon=True).start()

    def _watch(self) -> None:
        try:
            engine.select_device(self.worker)
            self.facts = engine.model_facts(self.worker)
            self.reprefill_off = reprefill.off(self.worker)
        except Exception as error:
            self.facts = {}
            self.failed("facts", error)
        while True:
            try:
                self.poll()
            except Exception as error:
                self.failed("control", error)
            time.sleep(POLL_S)

    def poll(self) -> None:
        """One look at the control file, the session's end and our own status."""
        try:
            stat = os.stat(self.root / "control.json")
            stamp = (stat.st_mtime_ns, stat.st_ino)
        except FileNotFoundError:
            stamp = None
        if stamp != self._stamp:
            self._stamp = stamp
            order = (spool.read_json(self.root / "control.json") or {}).get("arm")
            if order and self._arm and order.get("id") == self._arm.id:  # the same, renewed
                if self.session is not None:
                    self.session.extend(self._arm.ttl_s)
            else:
                self._end()
                if order:
                    self._start(Arm(**{f.name: order[f.name] for f in fields(Arm) if f.name in order}))
        session = self.session
        if session is not None and (session.expired or session.ending):
            self._end()
        self._say()

    def _start(self, arm: Arm) -> None:
        """Checksums first, then the hooks see the session; the client waits for the rank to say `armed`."""
        for old in self.folder.iterdir():
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
        folder = self.folder / arm.id
        folder.mkdir(mode=0o700)
        room = shutil.disk_usage(folder).free * 4 // 5  # never fill the server's disk
        arm = replace(arm, max_bytes=min(arm.max_bytes, room))
        self._arm, self._last, self._parameters = arm, None, "done"
        steps = [parameters.write_parameters] + ([parameters.write_target] if arm.target else [])
        for step in steps:
            try:
                step(self.worker, folder)
            except Exception as error:
                self._parameters = f"{step.__name__}: {type(error).__name__}: {error}"
                self.failed(step.__name__, error)
        if self.identity.primary or arm.all_ranks:
            self._last = self.session = Session(arm, folder, self.identity.name, self.stager)

    def _end(self) -> None:
        session, self.session, self._arm = self.session, None, None
        if session is not None:
            session.end()

    def _say(self) -> None:
        """Write our status when it has changed."""
        last = self._last
        status = {
            "rank": self.identity.name,
            "primary": self.identity.primary,
            "pid": os.getpid(),
            "hooks": self.hooks,
            "armed": self._arm.id if self._arm else None,
            "records": self.session is not None,
            "closed": last is None or last.closed,
            "parameters": self._parameters,
            "session": {"id": last.arm.id, **last.status()} if last else None,
            "errors": dict(self.errors),
            "last_error": self.last_error,
            "reprefill_off": self.reprefill_off,
            "facts": self.facts,
        }
        if status != self._said:
            write_json(self.folder / "status.json", status)
            self._said = status
