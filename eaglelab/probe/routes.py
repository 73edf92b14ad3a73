"""The probe's routes on SGLang's own HTTP app, under the server's own key.

Every route is ADMIN_OPTIONAL: the admin key where there is one, else the API key, else open like the rest
of the server (sglang 0.5.23 utils/auth.py). A server with several tokenizer workers checks no keys, so
there they answer 404.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
import time
from dataclasses import fields
from typing import Any

from eaglelab.probe import engine, reprefill, spool
from eaglelab.probe.session import Arm

PREFIX = "/eaglelab"
_lock = threading.Lock()
_order: dict[str, Any] = {}


def attach() -> bool:
    """Add the routes to SGLang's app. False where this SGLang has no app to add them to."""
    try:
        from sglang.srt.entrypoints.http_server import app
    except ImportError:
        return False
    app.include_router(router())
    return True


def router() -> Any:
    from fastapi import APIRouter, Body, Depends, HTTPException
    from fastapi.responses import FileResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    def single_tokenizer() -> None:
        if engine.tokenizer_workers() != 1:
            raise HTTPException(404, "eaglelab's routes need --tokenizer-worker-num 1")

    routes = APIRouter(prefix=PREFIX, dependencies=[Depends(single_tokenizer)])
    admin = auth_level(AuthLevel.ADMIN_OPTIONAL)

    @routes.get("/status")
    @admin
    def status() -> dict[str, Any]:
        return state()

    @routes.post("/arm")
    @admin
    def arm(order: dict[str, Any] = Body(default={})) -> dict[str, Any]:  # noqa: B006, B008
        try:
            return start(order)
        except Busy as error:
            raise HTTPException(409, str(error)) from None
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from None

    @routes.post("/disarm")
    @admin
    def disarm() -> dict[str, Any]:
        with _lock:
            spool.set_control(spool.folder(), None)
            _order.clear()
        return state()

    @routes.post("/renew/{arm_id}")
    @admin
    def renew_route(arm_id: str) -> dict[str, Any]:
        if not renew(arm_id):
            raise HTTPException(409, "no longer armed; the time to live had passed")
        return state()

    @routes.post("/discard/{arm_id}")
    @admin
    def discard_route(arm_id: str) -> dict[str, Any]:
        return {"discarded": discard(arm_id)}

    @routes.get("/files/{arm_id}")
    @admin
    def files(arm_id: str) -> dict[str, Any]:
        return {"files": listing(arm_id)}

    @routes.get("/files/{arm_id}/{rank}/{name}")
    @admin
    def download(arm_id: str, rank: str, name: str) -> Any:
        path = spool.inside(spool.folder(), rank, arm_id, name)
        if path is None:
            raise HTTPException(404, "no such file")
        return FileResponse(path, media_type="application/octet-stream")

    return routes


class Busy(Exception):
    """Somebody else's capture is under way."""


def state() -> dict[str, Any]:
    from eaglelab import __version__

    ranks = spool.statuses(spool.folder())
    left = max(0.0, _order["until"] - time.time()) if _order else 0.0
    return {
        "probe": __version__,
        "armed": _order["id"] if left else None,
        "seconds_left": round(left, 1),
        "reprefill_budget": reprefill.budget(),
        "ranks": ranks,
    }


def start(order: dict[str, Any]) -> dict[str, Any]:
    """Check an order and pass it to the schedulers. Answers what the client needs to name requests."""
    kinds: dict[str, type] = {
        f.name: type(f.default) for f in fields(Arm) if f.name not in ("id", "rid_prefix")
    }
    force = order.pop("force", False)
    for name, value in order.items():
        if name not in kinds:
            raise ValueError(f"{name}: unknown; known are {', '.join(sorted(kinds))}, force")
        if kinds[name] is float and type(value) is int:
            order[name] = value = float(value)
        if type(value) is not kinds[name] or not (value is False or value > 0):  # type: ignore[operator]
            raise ValueError(f"{name}: {value!r} is not a {kinds[name].__name__} above 0")
    with _lock:
        if _order and _order["until"] > time.time() and not force:
            raise Busy("armed by another capture; wait for it, or disarm")
        arm_id = secrets.token_hex(4)
        arm = {"id": arm_id, "rid_prefix": f"eaglelab-{arm_id}-", "ttl_s": Arm.ttl_s, **order}
        spool.set_control(spool.folder(), arm)
        _order.update(id=arm_id, until=time.time() + arm["ttl_s"], arm=arm)
    return {**arm, "reprefill_prefix": os.environ[spool.NONCE]}


def renew(arm_id: str) -> bool:
    """Give the armed order its time to live once more; False when it is no longer armed."""
    with _lock:
        if not _order or _order["id"] != arm_id or _order["until"] < time.time():
            return False
        spool.set_control(spool.folder(), _order["arm"])
        _order["until"] = time.time() + _order["arm"]["ttl_s"]
        return True


def discard(arm_id: str) -> bool:
    """Remove what was recorded under an id that is no longer armed."""
    if _order and _order["id"] == arm_id or not spool.NAME.fullmatch(arm_id):
        return False
    for folder in spool.folder().glob(f"*/{arm_id}"):
        shutil.rmtree(folder, ignore_errors=True)
    return True


def listing(arm_id: str) -> list[dict[str, Any]]:
    """Every file recorded under this arm id, with size and sha256."""
    root, found = spool.folder(), []
    for path in sorted(root.glob(f"*/{arm_id}/*")) if spool.NAME.fullmatch(arm_id) else []:
        if (
            spool.inside(root, path.parent.parent.name, arm_id, path.name) is None
            or path.suffix == ".partial"
        ):
            continue
        with open(path, "rb") as source:
            digest = (
                hashlib.file_digest(source, "sha256") if hasattr(hashlib, "file_digest") else _digest(source)
            )
        found.append({"rank": path.parent.parent.name, "name": path.name, "bytes": path.stat().st_size,
                      "sha256": digest.hexdigest()})  # fmt: skip
    return found


def _digest(source: Any) -> Any:
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
    return digest
