"""Jane Austen's six novels (public domain), read out of Debian's package r-cran-janeaustenr without R."""

import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

from eaglelab.errors import BadInput

PACKAGE = "r-cran-janeaustenr"
RDB = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
BLOCK = 40  # paragraphs in a block of text
HELD_OUT = (25, 12)  # every 25th block, beginning with the 12th, is kept out of all training


def fetch(folder: Path) -> Path:
    """Download and unpack the Debian package below folder; returns its data file (.rdb)."""
    rdb = folder / "deb" / RDB
    if rdb.exists():
        return rdb
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise BadInput(
            f"{' and '.join(missing)} not found: the novels come out of Debian's package {PACKAGE}. "
            f"Run this on Debian or Ubuntu, or unpack the package's Rdata.rdb yourself as {rdb}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    got = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True)
    files = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if got.returncode or not files:
        raise BadInput(
            f"`apt-get download {PACKAGE}` failed (try `apt-get update` first): {got.stderr.strip()}"
        )
    subprocess.run(["dpkg-deb", "-x", files[-1], folder / "deb"], check=True)
    return rdb


def r_values(rdb: bytes) -> Iterator[bytes]:
    """The values of an R lazy-load database: each is a big-endian uncompressed length and a zlib stream."""
    at = 0
    while at < len(rdb):
        stream = zlib.decompressobj()
        value = stream.decompress(rdb[at + 4 :])
        if len(value) != struct.unpack(">I", rdb[at : at + 4])[0]:
            raise BadInput(f"value at byte {at} of Rdata.rdb does not have the length it states")
        at = len(rdb) - len(stream.unused_data)
        yield value


def r_strings(value: bytes) -> list[str]:
    """An R character vector, serialised as XDR: header, flags, count, then (flags, length, bytes) of each."""
    version, encoding = struct.unpack(">i", value[2:6])[0], struct.unpack(">i", value[14:18])[0]
    at = 14 if version == 2 else 18 + encoding  # version 3 adds the name of the native encoding
    flags, count = struct.unpack(">Ii", value[at : at + 8])
    if flags & 0xFF != 16:  # STRSXP
        raise BadInput("Rdata.rdb holds something else than character vectors; is it r-cran-janeaustenr's?")
    strings, at = [], at + 8
    for _ in range(count):
        length = max(struct.unpack(">i", value[at + 4 : at + 8])[0], 0)
        strings.append(value[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return strings


def blocks(rdb: Path) -> tuple[list[str], list[str]]:
    """(training, held-out) blocks of text, one paragraph a line, in the order of the books."""
    text = "\n".join("\n".join(r_strings(value)) for value in r_values(rdb.read_bytes())).replace("_", "")
    paragraphs = [re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text)]
    paragraphs = [p for p in paragraphs if len(p) > 20]
    every = ["\n".join(paragraphs[i : i + BLOCK]) + "\n" for i in range(0, len(paragraphs), BLOCK)]
    step, first = HELD_OUT
    return [b for i, b in enumerate(every) if i % step != first], [
        b for i, b in enumerate(every) if i % step == first
    ]
