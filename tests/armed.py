"""A stand-in server: answers by path, and a probe that has recorded what `capture_maker` makes."""

from __future__ import annotations

import hashlib
import json

import httpx
from capture_maker import make_capture

from eaglelab.server import Server

KEY = "sk-very-secret-0123456789"
INFO = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4, "tp_size": 1, "version": "0.5.23", "model_path": "/m",
    "dtype": "float32", "max_running_requests": 4, "launch_command": ["python", "--api-key", KEY],
    "api_key": KEY, "admin_api_key": KEY,
    "internal_states": [{"avg_spec_accept_length": 2.5}, {"avg_spec_accept_length": 3.5}, {}],
}  # fmt: skip


class Stub:
    """Answers by path: a value (JSON), an int (status) or an exception."""

    def __init__(self, **answers):
        self.answers = {"/server_info": INFO, "/model_info": {"model_path": "/m"}, **answers}
        self.seen = []

    def __call__(self, request):
        self.seen.append(request)
        answer = self.answers.get(request.url.path, 404)
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(answer) if isinstance(answer, int) else httpx.Response(200, json=answer)


class Armed:
    """A server whose probe has recorded what `make_capture` makes."""

    def __init__(self, folder, **changes):
        self.folder, self.order, self.state = folder, None, "idle"
        self.truths = make_capture(folder, [(5, [1, 3], 99), (4, [2, 2], 99)])
        rename = {f"r{i}": f"eaglelab-1-{i:04d}" for i in range(2)}
        path = folder / "events.jsonl"
        text = path.read_text()
        for old, new in rename.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        path.write_text(text)
        self.truths = {rename[rid]: truth for rid, truth in self.truths.items()}
        (folder / "capture.json").unlink()
        (folder / "parameters.json").write_text('[{"name": "fc.weight"}]')
        self.answers = {
            "/eaglelab/status": lambda r: self.status(), "/eaglelab/arm": self.arm,
            "/eaglelab/disarm": self.disarm, "/generate": self.generate,
            "/eaglelab/files/1": lambda r: self.files(), "/eaglelab/renew/1": {},
        }  # fmt: skip
        for entry in self.files()["files"]:
            self.answers[f"/eaglelab/files/1/dp0.tp0/{entry['name']}"] = self.file(folder / entry["name"])
        self.answers |= changes

    def file(self, path):
        return lambda request: httpx.Response(200, content=path.read_bytes())

    def arm(self, request):
        self.order, self.state = json.loads(request.content), "armed"
        return {"id": "1", "rid_prefix": "eaglelab-1-", "reprefill_prefix": "n"}

    def disarm(self, request):
        self.state = "closed"
        return {}

    def status(self):
        written = len((self.folder / "events.jsonl").read_text().splitlines())
        session = {"id": "1", "seen": written, "written": written, "dropped": 0, "dropped_rids": {},
                   "bytes": 1,
                   "errors": {}, "last_error": ""}  # fmt: skip
        target = {
            "architecture": "F",
            "hidden_size": 4,
            "num_layers": 2,
            "vocab_size": 10**3,
            "dtype": "float32",
        }
        rank = {
            "hooks": {"a": True}, "primary": True, "armed": "1" if self.state == "armed" else None,
            "closed": self.state == "closed", "session": session, "parameters": "done",
            "reprefill_off": "graphs",
            "facts": {"target": target, "engine": {"name": "sglang", "version": "0.5.23"}},
        }  # fmt: skip
        armed = {"armed": rank["armed"], "seconds_left": 9.0 if rank["armed"] else 0.0}
        return {"probe": "0.1.0", "reprefill_budget": 1 << 30, "ranks": {"dp0.tp0": rank}, **armed}

    def generate(self, request):
        rids = json.loads(request.content)["rid"]
        truths = [self.truths[rid] for rid in rids]
        return [
            {"output_ids": t.tokens[len(t.prompt) :], "text": "x", "meta_info": {"spec_verify_ct": 2}}
            for t in truths
        ]

    def files(self):
        found = []
        for path in sorted(self.folder.iterdir()):
            raw = path.read_bytes()
            digest = hashlib.sha256(raw).hexdigest()
            found.append({"rank": "dp0.tp0", "name": path.name, "bytes": len(raw), "sha256": digest})
        return {"files": found}

    def prompts(self):
        return [t.prompt for t in self.truths.values()]

    def server(self):
        return Server("http://127.0.0.1:1", KEY, transport=httpx.MockTransport(Stub(**self.answers)))
