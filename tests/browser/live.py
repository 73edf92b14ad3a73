"""The stand-in server of `armed` behind a real socket, with a key, for a kernel that cannot be handed one."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from armed import INFO, KEY, Armed


@contextlib.contextmanager
def live(folder: Path) -> Iterator[tuple[str, Armed]]:
    """(its address, the server behind it)."""
    made = Armed(folder)
    made.answers |= {"/server_info": INFO, "/model_info": {"model_path": "/m"}, "/eaglelab/discard/1": {}}

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer: Any = made.answers.get(self.path, 404)
            if self.headers.get("Authorization") != f"Bearer {KEY}":
                answer = 401
            elif callable(answer):
                answer = answer(SimpleNamespace(content=body))
            self._send(answer)

        def _send(self, answer: Any) -> None:
            code = answer if isinstance(answer, int) else 200
            raw = answer.content if isinstance(answer, httpx.Response) else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = _answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", made
    finally:
        server.shutdown()
        server.server_close()
