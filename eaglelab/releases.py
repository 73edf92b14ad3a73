"""Where SGLang's releases differ in what they do with an EAGLE-3 drafter: one table, and who has seen it.

Each line is a behaviour of the newest release and the release that brought it. Read from the wheels;
`make compat` checks every line against the sources of all releases from 0.5.10 to 0.5.23. A release that is
newer than these, or one whose number cannot be read, is taken to do the same as the newest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Number = tuple[int, int, int]

OLDEST, NEWEST = "0.5.10", "0.5.23"  # of the releases that `make compat` reads
FIRST_WITH_PLUGINS: Number = (0, 5, 11)
FIRST_WITH_PROBE: Number = (0, 5, 14)  # before, a draft worker has no method at which the probe could attach


@dataclass(frozen=True)
class Behaviour:
    """What the newest release does, since when, and what was done before. `thread`: where it is told."""

    name: str
    since: Number
    now: str
    before: str
    thread: str = ""


BEHAVIOURS = (
    Behaviour(
        "accept-rate",
        (0, 5, 11),
        "the logged accept rate is accepted drafts / proposed drafts",
        "the logged accept rate counts the bonus: nothing accepted reads 1 / draft tokens",
        "sglang#23530",
    ),
    Behaviour(
        "several-layers",
        (0, 5, 12),
        "the decoder layers are called layers.N, and midlayer is another name of the first",
        "one decoder layer, called midlayer: tensors called layers.0 are dropped, several layers refused",
        "sglang#24663",
    ),
    Behaviour(
        "chunk-count",
        (0, 5, 12),
        "fc takes num_aux_hidden_states chunks, else as many as there are layer ids, else 3",
        "fc always takes 3 chunks",
    ),
    Behaviour("fc-norm", (0, 5, 12), "fc_norm is applied to each chunk", "fc_norm is not read"),
    Behaviour("norm-output", (0, 5, 12), "norm_output is read", "norm_output is not read"),
    Behaviour(
        "draft-window",
        (0, 5, 12),
        "--speculative-draft-window-size is honoured",
        "--speculative-draft-window-size does nothing for EAGLE-3",
    ),
    Behaviour(
        "step-positions",
        (0, 5, 12),
        "draft steps stand at the positions at which the text goes on",
        "draft steps stand one position further on",
        "sglang#25015",
    ),
    Behaviour(
        "mla-drafter",
        (0, 5, 12),
        "there is a drafter with latent attention (Eagle3DeepseekV2ForCausalLM)",
        "there is no drafter with latent attention",
    ),
    Behaviour(
        "mla-norms",
        (0, 5, 13),
        "the drafter with latent attention reads fc_norm and norm_output",
        "the drafter with latent attention reads neither fc_norm nor norm_output",
    ),
    Behaviour(
        "deepseek-ids",
        (0, 5, 13),
        "DeepSeek, Kimi and GLM-4 MoE Lite add 1 to the layer ids only if the first is 1",
        "DeepSeek and Kimi add 1 to every layer id",
        "sglang#25454",
    ),
    Behaviour(
        "gpt-oss-ids",
        (0, 5, 17),
        "GPT-OSS adds 1 to the layer ids unless the largest is the number of layers",
        "GPT-OSS adds 1 to every layer id",
    ),
    Behaviour(
        "norm-before-fc",
        (0, 5, 17),
        "norm_before_fc is read, and input_norm applied to the whole feed",
        "norm_before_fc is not read, and input_norm dropped",
    ),
)
SINCE = {b.name: b.since for b in BEHAVIOURS}


def number(version: str) -> Number | None:
    """(0, 5, 12) of "0.5.12", "0.5.12.post1" or "0.5.12.dev3+gabc"; None for what is no release number."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def at_least(version: str, since: Number) -> bool:
    """Whether a release is this one or a later one; a version that cannot be read counts as the newest."""
    own = number(version)
    return own is None or own >= since


def does(version: str, behaviour: str) -> bool:
    """Whether a release behaves as the newest does, in one line of the table."""
    return at_least(version, SINCE[behaviour])


def has_plugins(version: str) -> bool:
    """Whether a release loads plugins at all; an unknown one gets the benefit of the doubt."""
    return at_least(version, FIRST_WITH_PLUGINS)


def takes_probe(version: str) -> bool:
    """Whether the probe attaches to this release's draft worker."""
    return at_least(version, FIRST_WITH_PROBE)


def differences(version: str) -> list[str]:
    """What an older release does otherwise, in words."""
    return [b.before for b in BEHAVIOURS if not does(version, b.name)]


def caveat(version: str) -> str | None:
    """What to say before relying on the table for this version; None for a release that was checked."""
    own, oldest, newest = number(version), number(OLDEST), number(NEWEST)
    assert oldest and newest
    if own is None:
        return f"the engine's version is not known ({version!r}): it is taken to do the same as {NEWEST}"
    if own > newest:
        return f"SGLang {version} is newer than what was checked: it is taken to do the same as {NEWEST}"
    if own < oldest:
        return f"SGLang {version} is older than what was checked: it is taken to do the same as {OLDEST}"
    return None
