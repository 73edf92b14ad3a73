"""The one HTTP client: a running SGLang server's facts, generations, counters, and its probe.

The API key goes out in one header and appears nowhere else: not in a repr, a message or a file. Proxies of
the environment and redirects are not followed, so that it reaches the address that was given and no other.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from eaglelab.counters import Answer, Counters, histogram, total
from eaglelab.errors import AttachError, BadInput
from eaglelab.prompts import Prompt
from eaglelab.releases import has_plugins, takes_probe

if TYPE_CHECKING:
    from eaglelab.launch import Launch

MAX_JSON = 256 << 20  # bytes of one JSON answer
EAGLES = ("EAGLE", "EAGLE3", "NEXTN")
STILL_WORKS = "Facts, counters and a static diagnosis still work; a capture and a report do not."
# Kept of /server_info and /model_info besides `launch.SERVER_FIELDS`: never the launch command or a key.
FACTS = (
    "model_path", "served_model_name", "version", "dtype", "tp_size", "nnodes", "max_running_requests",
    "tokenizer_worker_num", "is_embedding", "random_seed", "architectures", "model_type", "weight_version",
    "skip_tokenizer_init", "max_total_tokens", "ep_size", "speculative_algorithm", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_draft_model_path",
    "speculative_draft_window_size",
)  # fmt: skip


@dataclass(frozen=True)
class ServerFacts:
    """Allow-listed facts, as SGLang names them (/server_info and /model_info)."""

    fields: dict[str, Any]
    lifetime_accept_length: float | None = None

    @property
    def launch(self) -> Launch:
        from eaglelab.launch import Launch, Target

        target = self.fields.get("target")
        return Launch.from_server(self.fields, target=Target(**target) if target else None)

    @property
    def version(self) -> str:
        return str(self.fields.get("version") or "unknown")

    @property
    def algorithm(self) -> str | None:
        return self.fields.get("speculative_algorithm")

    @property
    def has_plugins(self) -> bool:
        """Whether this version loads plugins; an unknown version gets the benefit of the doubt."""
        return has_plugins(self.version)


def address(text: str) -> str:
    """The address of a server as it is spoken to; http:// may be left out. BadInput on what is none."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        fits = parts.scheme in ("http", "https") and parts.hostname and not parts.netloc.isdigit()
        fits = fits and parts.port != 0  # a port that is no number, or too high, raises
    except ValueError:
        fits = False
    if not fits:
        raise BadInput(f"{text!r} is not an address like http://HOST:PORT")
    if parts.username or parts.password or parts.query:
        raise BadInput("no user, password or query belongs in the address; the key comes by EAGLELAB_API_KEY")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


class Server:
    """A running SGLang server at `url`. Every failure is an AttachError that says what to do."""

    def __init__(
        self, url: str, key: str | None = None, timeout: float = 30.0, transport: Any = None
    ) -> None:
        self.url = address(url)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            trust_env=False,
            follow_redirects=False,
            transport=transport,
        )

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    # -- facts

    def facts(self) -> ServerFacts:
        """Facts of the server; needs no plugin."""
        from eaglelab.launch import SERVER_FIELDS

        info = self._first("/server_info", "/get_server_info")
        if "speculative_algorithm" not in info and "tp_size" not in info:
            raise self._not_sglang("/server_info has no field of SGLang's")
        model = self._first("/model_info", "/get_model_info")
        wanted = (*FACTS, *SERVER_FIELDS)
        fields = {
            name: value for name, value in {**model, **info}.items() if name in wanted and _plain(value)
        }
        states = [s for s in info.get("internal_states") or [] if isinstance(s, dict)]
        lengths = [s.get("avg_spec_accept_length") for s in states]
        known = [x for x in lengths if isinstance(x, int | float) and x > 0]
        return ServerFacts(fields, sum(known) / len(known) if known else None)

    @property
    def launch(self) -> Launch:
        return self.facts().launch

    def require_speculation(self, facts: ServerFacts | None = None) -> ServerFacts:
        """The facts, or an AttachError where there is no EAGLE drafter to look at."""
        facts = facts or self.facts()
        if not facts.algorithm:
            text = "runs without speculation: there is no drafter to look at. Relaunch it with"
            raise AttachError(f"{self.url} {text} --speculative-algorithm EAGLE3 and a drafter.")
        if facts.algorithm not in EAGLES:
            text = f"runs --speculative-algorithm {facts.algorithm}; eaglelab knows {', '.join(EAGLES)}"
            raise AttachError(f"{self.url} {text}.")
        return facts

    # -- generation

    def token_ids(self, prompt: Prompt) -> list[int] | None:
        """The server's own token ids of a prompt, its chat template applied; None where it says none."""
        if prompt.input_ids is not None:
            return list(prompt.input_ids)
        body = {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.prompt}
        answer = None
        with contextlib.suppress(AttachError):  # some old servers break off here
            answer = self._send("POST", "/v1/tokenize", body, allow=(400, 404, 422, 500), last=True)
        tokens = None if answer is None else answer.get("tokens")
        if isinstance(tokens, list) and tokens and all(type(t) is int for t in tokens):
            return tokens
        if prompt.messages:
            text = "cannot apply its chat template over HTTP (/v1/tokenize)"
            raise AttachError(f"{self.url} {text}; give `prompt` or `input_ids` instead of `messages`.")
        return None

    def generate(
        self,
        prompts: list[list[int]] | list[str],
        max_new_tokens: int = 128,
        rids: list[str] | None = None,
        ignore_eos: bool = False,
        timeout: float = 1800.0,
    ) -> list[Answer]:
        """One batch, greedy, a fresh cache salt each. All prompts are token ids, or all are texts.

        Some of the answers may be `aborted`; AttachError if all are.
        """
        rids = rids or [f"eaglelab-{secrets.token_hex(8)}" for _ in prompts]
        body = {
            "text" if isinstance(prompts[0], str) else "input_ids": prompts,
            "rid": rids,
            "cache_salt": [secrets.token_hex(16) for _ in prompts],
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
        }
        answers = self._send("POST", "/generate", body, timeout=timeout)
        if not isinstance(answers, list) or len(answers) != len(prompts):
            got = f"{len(prompts)} answers were due, got {str(answers)[:200]}"
            raise AttachError(f"{self.url}/generate: {got}")
        found = []
        for rid, answer in zip(rids, answers, strict=True):
            meta = answer.get("meta_info") or {}
            found.append(Answer(rid, answer.get("output_ids"), answer.get("text"), meta))
        if all(a.aborted is not None for a in found):
            raise AttachError(f"{self.url}: every request was aborted: {found[0].aborted}")
        return found

    def counters(self, answers: list[Answer], facts: ServerFacts | None = None) -> Counters:
        """SGLang's counters, summed over `answers`; `measurements` gives them names and definitions."""
        told = [answer.meta_info for answer in answers if answer.aborted is None]
        facts = facts or self.facts()
        return Counters(
            correct=total(told, "correct"),
            proposed=total(told, "proposed"),
            verifies=total(told, "verifies"),
            completion_tokens=total(told, "completion"),
            draft_tokens=int(facts.fields.get("speculative_num_draft_tokens") or 0),
            lifetime_accept_length=facts.lifetime_accept_length,
            steps=int(facts.fields.get("speculative_num_steps") or 0),
            topk=int(facts.fields.get("speculative_eagle_topk") or 1),
            histogram=histogram(told),
        )

    # -- the probe

    def probe_status(self, facts: ServerFacts | None = None) -> dict[str, Any]:
        """What the probe says of itself, each rank by name; AttachError says why there is none."""
        status = self._send("GET", "/eaglelab/status", allow=(404,))
        answers = isinstance(status, dict) and "ranks" in status
        if answers and status["ranks"]:
            return status
        facts = facts or self.facts()
        if answers and takes_probe(facts.version):
            return status
        if not facts.has_plugins:
            text = f"is SGLang {facts.version}, too old for plugins (0.5.11 and later load them)"
        elif not takes_probe(facts.version):
            text = f"is SGLang {facts.version}, too old for the probe (it attaches to 0.5.14 and later)"
        elif (facts.fields.get("tokenizer_worker_num") or 1) > 1:
            text = "runs several tokenizer workers, where SGLang checks no API key, so the probe adds no"
            text += " routes: relaunch it with --tokenizer-worker-num 1"
        else:
            text = "has no eaglelab plugin: `pip install /path/to/eaglelab`, a checkout, in the server's"
            text += " environment and restart it (if SGLANG_PLUGINS is set there, add eaglelab to it)"
        raise AttachError(f"{self.url} {text}. {STILL_WORKS}{_without_probe(facts)}")

    def arm(self, **order: Any) -> dict[str, Any]:
        """Arm the probe (fields of `probe.session.Arm`). Returns the order, `id` and request prefixes."""
        armed = self._send("POST", "/eaglelab/arm", order, allow=(409,))
        if armed is None:
            raise self._armed_already(self.probe_status())
        return armed

    def wait_until_free(self, facts: ServerFacts, seconds: float, say: Callable[[str], None]) -> None:
        """Let another capture end, or the lease of one that was killed. AttachError after `seconds`."""
        until, told = time.monotonic() + seconds, False
        while (status := self.probe_status(facts)).get("armed"):
            if time.monotonic() >= until:
                raise self._armed_already(status)
            if not told:
                say(f"another capture has armed {self.url}: waiting up to {seconds:.0f} s")
            told = True
            time.sleep(min(1.0, max(0.0, until - time.monotonic())))

    def _armed_already(self, status: dict[str, Any]) -> AttachError:
        left = f"which ends by itself in {status.get('seconds_left', 0):.0f} s at the latest"
        what = "Wait for it (report: --wait SECONDS), or end it with `eaglelab disarm` if it is yours."
        return AttachError(f"{self.url} is armed by another capture, {left}. {what}")

    def disarm(self) -> dict[str, Any]:
        return self._send("POST", "/eaglelab/disarm", {})

    def renew(self, arm_id: str) -> None:
        """Start the armed order's time to live anew."""
        self._send("POST", f"/eaglelab/renew/{arm_id}", {})

    def discard(self, arm_id: str) -> None:
        """Remove on the server what was recorded under an order that is disarmed."""
        self._send("POST", f"/eaglelab/discard/{arm_id}", {}, allow=(404,))

    def files(self, arm_id: str) -> list[dict[str, Any]]:
        """rank, name, bytes and sha256 of each file recorded under `arm_id`."""
        return self._send("GET", f"/eaglelab/files/{arm_id}", timeout=600.0)["files"]

    def download(self, arm_id: str, rank: str, name: str, sink: Any, size: int) -> None:
        """Write one recorded file to the binary file `sink`; never more than `size` bytes."""
        path = f"/eaglelab/files/{arm_id}/{rank}/{name}"
        try:
            with self._client.stream("GET", path) as response:
                if response.status_code != 200:
                    raise AttachError(f"{self.url}{path}: HTTP {response.status_code}")
                for block in response.iter_bytes():
                    size -= len(block)
                    if size < 0:
                        raise AttachError(f"{self.url}{path}: longer than announced")
                    sink.write(block)
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from error

    # -- transport

    def _first(self, *paths: str) -> dict[str, Any]:
        for path in paths:
            answer = self._send("GET", path, allow=(404, 405))
            if isinstance(answer, dict):
                return answer
        raise self._not_sglang(f"it does not answer {paths[0]} with a JSON object")

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        allow: tuple[int, ...] = (),
        timeout: float | None = None,
        last: bool = False,
    ) -> Any:
        """The JSON answer; None for a status in `allow`. `last`: the connection is then closed."""
        extra: dict[str, Any] = {} if body is None else {"json": body}
        if last:
            extra["headers"] = {"Connection": "close"}
        if timeout is not None:
            extra["timeout"] = httpx.Timeout(timeout, connect=10.0)
        try:
            with self._client.stream(method, path, **extra) as response:
                text = bytearray()
                for block in response.iter_bytes():
                    text += block
                    if len(text) > MAX_JSON:
                        raise AttachError(f"{self.url}{path}: the answer is over {MAX_JSON >> 20} MiB")
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from error
        code = response.status_code
        if code in allow:
            return None
        if code in (401, 403):
            whose = "refuses the API key" if "Authorization" in self._client.headers else "wants an API key"
            raise AttachError(
                f"{self.url} {whose} (HTTP {code}). Set EAGLELAB_API_KEY or use --api-key-file."
            )
        if 300 <= code < 400:
            raise AttachError(f"{self.url}{path} redirects (HTTP {code}); give the server's own address.")
        if code != 200:
            raise AttachError(f"{self.url}{path}: HTTP {code}: {bytes(text[:300]).decode(errors='replace')}")
        try:
            return json.loads(bytes(text))
        except ValueError as error:
            raise self._not_sglang(f"{path} is not JSON") from error

    def _unreachable(self, path: str, error: httpx.HTTPError) -> AttachError:
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            parts = urlsplit(self.url)
            why = type(error).__name__ + ("" if parts.port else "; no port was given: SGLang's own is 30000")
            return AttachError(f"{self.url}: nothing answers there ({why}). Is it up, and the port right?")
        if isinstance(error, httpx.TimeoutException):
            return AttachError(f"{self.url}{path}: no answer in time; the server is up but busy or stuck.")
        why = f"{type(error).__name__}: {str(error).rstrip('.')}"
        return AttachError(
            f"{self.url}{path}: {why}. Has the server ended (see its log)? Is this an HTTP server?"
        )

    def _not_sglang(self, why: str) -> AttachError:
        path = urlsplit(self.url).path
        hint = f" Try the address without {path}." if path else ""
        return AttachError(f"{self.url} does not look like an SGLang server: {why}.{hint}")


def _without_probe(facts: ServerFacts) -> str:
    """The command that compares training with serving by this server's own launch, without the probe."""
    try:
        flags = facts.launch.with_target(None).command()
    except BadInput:
        return ""
    engine = f" --engine sglang=={facts.version}" if facts.version != "unknown" else ""
    draft = facts.fields.get("speculative_draft_model_path") or "DRAFTER"
    target = facts.fields.get("model_path") or "TARGET"
    words = shlex.join(["eaglelab", "inspect", str(draft), "--target", str(target)])
    return f" Compare trained with served: {words}{engine} --launch {shlex.quote(flags)}"


def _plain(value: Any) -> bool:
    """Numbers, texts and short lists of them: what a fact may be."""
    if isinstance(value, list):
        return len(value) <= 64 and all(isinstance(v, (str, int, float)) for v in value)
    return value is None or isinstance(value, (str, int, float, bool))
