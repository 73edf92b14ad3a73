"""What the genuine server makes of the models: rightly and wrongly launched, as a tree; a golden capture."""

from pathlib import Path
from typing import Any

from eaglelab.capture import open_capture
from eaglelab.collect import capture_server
from eaglelab.errors import EaglelabError
from eaglelab.prompts import load_prompts
from eaglelab.serve import start_server
from eaglelab.server import Server

NEW = 128  # tokens generated for each prompt
SERVERS: dict[str, dict[str, Any]] = {  # 5 steps each; 6 draft tokens for a chain, 16 for the tree
    "plain": {"algorithm": None},
    "EAGLE3": {},
    "EAGLE": {"algorithm": "EAGLE"},
    "EAGLE3 topk 4": {"topk": 4},
}
RIGHT, WRONG = 3.3, 1.05  # accept lengths: at least, under EAGLE3; at most, under EAGLE


class Unfit(EaglelabError):
    """The models do not show what they are made to show."""

    exit_code = 1


def measure(models: Path) -> dict[str, dict[str, float]]:
    """Accept lengths of SERVERS on prompts.jsonl; raises Unfit where a text or an accept length is wrong."""
    prompts = load_prompts(models / "prompts.jsonl")
    texts, figures = {}, {}
    for name, launch in SERVERS.items():
        with (
            start_server(target=models / "target", drafter=models / "drafter-sglang", **launch) as running,
            Server(running.url) as server,
        ):
            answers = server.generate([server.token_ids(p) or [] for p in prompts], NEW, ignore_eos=True)
            counted = server.counters(answers)
        texts[name] = [answer.output_ids for answer in answers]
        if texts[name] != texts["plain"]:
            raise Unfit(f"{name}: the text is not that of plain decoding")
        if name != "plain":
            length = 1 + counted.correct / counted.verifies
            figures[name] = {"accept_length": round(length, 4), "verifies": counted.verifies}
    right, wrong = figures["EAGLE3"]["accept_length"], figures["EAGLE"]["accept_length"]
    if right < RIGHT or wrong > WRONG:
        raise Unfit(
            f"accept length {right} under EAGLE3 (wanted: {RIGHT} or more), {wrong} under EAGLE"
            f" (wanted: {WRONG} or less): train again with `--again target` or `--again drafter`"
        )
    return figures


def capture(models: Path, out: Path, new: int = 64) -> int:
    """Capture two prompts (of less repetitive texts) on an EAGLE3 chain; returns the number of events."""
    prompts = load_prompts(models / "prompts.jsonl")[4:6]
    with (
        start_server(target=models / "target", drafter=models / "drafter-sglang") as running,
        Server(running.url) as server,
    ):
        capture_server(server, prompts, out, max_new_tokens=new, ignore_eos=True)
    meta = out / "capture.json"  # the server's absolute paths become those that the installed models have
    meta.write_text(meta.read_text().replace(str(models), "data"))
    return sum(1 for _ in open_capture(out).events())
