#!/bin/sh
# A browser for tests/browser: the system's; else Debian's package, if this is CI and we are root; else playwright's own.
cd "$(dirname "$0")/.."
say() { printf '%s\n' "eaglelab: $*" >&2; }

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && exit 0
done
if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing chromium (23 s, 0.4 GB) ..."
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 &&
        exit 0
fi
[ -x .venv/bin/playwright ] && timeout 300 .venv/bin/playwright install chromium >/dev/null 2>&1 && exit 0
say "no browser could be had; tests/browser will fail. Install Debian's chromium, or run: playwright install chromium"
