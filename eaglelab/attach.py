"""The attach panel's model: look at a server, arm it, send prompts, collect; and let go, whatever happens.

While a server is armed a thread renews a short lease. A kernel that dies, restarts or loses the server
renews nothing, so the probe disarms itself within `LEASE` seconds; an orderly end disarms at once.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglelab.collect import Progress, Recording
from eaglelab.errors import AttachError, BadInput, EaglelabError
from eaglelab.prompts import Prompt, load_prompts
from eaglelab.server import Server

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.counters import Answer
    from eaglelab.records import Measurement

LEASE = 30.0  # seconds that the probe stays armed without a word from us
BATCH = 2  # prompts at a time: the accept length is to be seen while it records


class Stopped(EaglelabError):
    """The reader let go in the middle of something."""


class Attachment:
    """One server. `disarm` may be called at any time, from any thread, and as often as one likes.

    It lets go of what was armed here; another's recording is left alone (`eaglelab disarm` ends any).
    """

    def __init__(self, url: str, key: str | None = None, transport: Any = None):
        self.server = Server(url, key, transport=transport)
        self.recording: Recording | None = None
        self.lost: AttachError | None = None  # why the lease could not be renewed
        self._stop = threading.Event()
        self._ours = ""  # id of what we armed and the server has not said to be disarmed
        _open.add(self)

    @property
    def armed(self) -> bool:
        return self.recording is not None

    def look(self) -> dict[str, Any]:
        """server and launch; probe, or why there is none; accept length of all traffic since its start."""
        facts = self.server.require_speculation()
        found: dict[str, Any] = {
            "server": f"{self.server.url}, SGLang {facts.version}",
            "launch": facts.launch.command(),
            "accept length, all traffic since its start": facts.lifetime_accept_length or "not counted",
        }
        try:
            found["probe"] = _status(self.server.probe_status(facts))
        except AttachError as error:
            found["probe"] = str(error)
        return found

    def status(self) -> str:
        """What the probe says of itself now, in a line."""
        return _status(self.server.probe_status())

    def arm(self, out: str | Path, progress: Progress) -> None:
        """Arm the server; the capture will go to `out`, a new folder."""
        if self.recording is not None:
            return
        self._stop.clear()
        self.lost = None

        def show(what: str, done: int, of: int) -> None:
            self._go_on()
            progress(what, done, of)

        recording = Recording(self.server, out, target=True, batch=BATCH, ttl=LEASE, progress=show)
        recording.__enter__()
        if self._stop.is_set():
            recording.__exit__()
            self._go_on()
        self.recording, self._ours = recording, recording.id
        threading.Thread(target=self._hold, args=(recording,), name="eaglelab-lease", daemon=True).start()

    def send(self, prompts: Sequence[Prompt], max_new_tokens: int = 128) -> list[Answer]:
        """Send prompts to the armed server."""
        return self._while_armed(lambda recording: recording.send(prompts, max_new_tokens))

    def finish(self) -> Capture:
        """Send every text again as one prefill, disarm, and collect."""
        recording = self._required()
        if not recording.answers:
            raise BadInput("nothing was sent yet, so there is nothing to collect")
        self._while_armed(lambda r: r.reprefill())
        try:
            recording.__exit__()
            return recording.collect()
        finally:
            self.recording, self._ours = None, ""

    def counters(self) -> list[Measurement]:
        """What the server has counted of the answers so far; [] before the first."""
        recording = self.recording
        return recording.counters().measurements() if recording and recording.answers else []

    def disarm(self) -> bool:
        """Let go at once, and keep nothing. Whether nothing of ours is armed, by the server's own words."""
        self._stop.set()
        self.recording = None
        if not self._ours:
            return True
        try:
            if self.server.probe_status().get("armed") == self._ours:
                self.server.disarm()
        except AttachError:
            return False
        with contextlib.suppress(AttachError):
            self.server.discard(self._ours)
        self._ours = ""
        return True

    def _required(self) -> Recording:
        if self.recording is None:
            raise self.lost or BadInput("the server is not armed")
        return self.recording

    def _while_armed(self, do: Any) -> Any:
        """Do something with the recording; on any error nothing stays armed."""
        recording = self._required()
        try:
            return do(recording)
        except BaseException as error:
            stopped, lost = self._stop.is_set(), self.lost
            self.disarm()
            if stopped:
                raise Stopped("stopped; nothing is armed, and nothing was kept") from None
            if lost is not None and isinstance(error, AttachError):
                raise lost from error
            raise

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Stopped("stopped; nothing is armed, and nothing was kept")

    def _hold(self, recording: Recording) -> None:
        """Renew the lease until this recording is over, or the server says no."""
        while not self._stop.wait(LEASE / 3) and self.recording is recording:
            try:
                recording.renew()
            except AttachError as error:
                if self.recording is recording and not self._stop.is_set():
                    self.lost = AttachError(f"no longer armed: {error}")
                    self.recording = None
                return


_open: weakref.WeakSet[Attachment] = weakref.WeakSet()


@atexit.register
def _let_go() -> None:
    """A kernel that is shut down or restarted disarms what it has armed."""
    for attachment in list(_open):
        if attachment.armed:
            attachment.disarm()


def asked(box: str, file: str, chat: bool = False) -> list[Prompt]:
    """The prompts of the panel: those of the file if one is named, else what stands in the box."""
    if file.strip():
        return load_prompts(Path(file.strip()).expanduser())
    if not box.strip():
        raise BadInput("write a prompt, choose an example, or name a file of prompts")
    if chat:
        return [Prompt(messages=({"role": "user", "content": box},))]
    return [Prompt(prompt=box)]


def _status(said: dict[str, Any]) -> str:
    """The probe's status in a line."""
    ranks = said["ranks"]
    if not ranks:
        return f"eaglelab {said['probe']}: no scheduler has reported yet"
    sessions = [r["session"] for r in ranks.values() if r.get("session")]
    state = f"armed, {said['seconds_left']:.0f} s left" if said.get("armed") else "not armed"
    seen, dropped = (sum(s[what] for s in sessions) for what in ("seen", "dropped"))
    size = sum(s["bytes"] for s in sessions) / 1e6
    line = f"eaglelab {said['probe']}, {len(ranks)} ranks, {state}"
    return f"{line}; last recording: {seen} events, {size:.1f} MB, {dropped} requests dropped"
