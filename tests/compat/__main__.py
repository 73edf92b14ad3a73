"""Fetch the releases, check every fact, print the table: `make compat`. Exit 1 if one is not as expected."""

from __future__ import annotations

import sys
from pathlib import Path

from compat.facts import KEY, RELEASES, Fact, all_facts, needed, unknown_rules
from compat.sources import Release, fetch
from eaglelab.releases import number

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "compat"
MARKS = {"there": "x", "moved": "m", "absent": "."}


def check(releases: list[Release], facts: list[Fact]) -> tuple[list[str], list[str]]:
    """-> (lines of the table, facts that are not as eaglelab expects them)."""
    short = [r.version.removeprefix("0.5.").replace(".post", "p") for r in releases]
    width = max(len(f.name) for f in facts)
    lines = [" " * width + "  0.5." + " ".join(f"{s:>4}" for s in short)]
    surprises = []
    for fact in facts:
        cells = []
        for release in releases:
            status = fact.status(release)
            version = number(release.version) or (0, 0, 0)
            wrong = (status != "absent") is not fact.expected(version)
            cells.append(MARKS[status] + ("!" if wrong else ""))
            if wrong:
                where = "expected" if status == "absent" else "not expected"
                surprises.append(f"{release.version}: {fact.name}: {status}, {where}")
        lines.append(f"{fact.name:<{width}}       " + " ".join(f"{c:>4}" for c in cells))
    surprises += [f"{r.version}: {name}: a rule for layer ids of no known form"
                  for r in releases for name in unknown_rules(r)]  # fmt: skip
    return lines, surprises


def main() -> int:
    CACHE.mkdir(parents=True, exist_ok=True)
    releases = []
    for version in RELEASES:
        try:
            releases.append(fetch(version, CACHE, needed, KEY))
        except OSError as error:
            print(error, file=sys.stderr)
    if not releases:
        return 1
    lines, surprises = check(releases, all_facts())
    print("\n".join(lines))
    print("\nx there   m moved (said elsewhere)   . absent   ! not as eaglelab expects it")
    print(f"{len(lines) - 1} facts in {len(releases)} releases, {len(surprises)} surprises")
    for line in surprises:
        print(line)
    return 1 if surprises or len(releases) < len(RELEASES) else 0


if __name__ == "__main__":
    sys.exit(main())
