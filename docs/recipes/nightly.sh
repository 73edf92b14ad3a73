#!/bin/sh
# One report into a folder of reports, compared with a fixed baseline, with the history page made anew.
# usage: nightly.sh RUNS --server URL --drafter PATH [any other option of `eaglelab report`]
# Exit code: that of the report (0 healthy, 1 broken or inconclusive, 2 to 6 see `eaglelab --help`).
set -u
runs=${1:?usage: nightly.sh RUNS --server URL --drafter PATH}
shift
mkdir -p "$runs"
out="$runs/$(date -u +%Y%m%dT%H%M%SZ)"
# The first healthy run stays the baseline until you delete this file: a baseline that moved along every night
# would never see a slow decline.
if [ -s "$runs/baseline" ]; then
    set -- "$@" --baseline "$(cat "$runs/baseline")"
fi
eaglelab report "$@" --wait 1800 --timeout 3600 --out "$out"
code=$?
if [ -d "$out" ]; then
    eaglelab export "$out" --to junit --out "$out/junit.xml"
    eaglelab history "$runs" --out "$runs/history.html"
    if [ "$code" -eq 0 ] && [ ! -e "$runs/baseline" ]; then
        printf '%s\n' "$out" >"$runs/baseline"
    fi
fi
exit "$code"
