"""Rebuild everything in data/: `make data`, which calls this. About 25 minutes on two cores, without a GPU.

Each stage leaves its result in the scratch folder, and its figures in done-<stage>.json once it is whole:
a run that was stopped goes on where it was. data/ is touched only at the end, when all is made and measured.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import time
from pathlib import Path

from stages import DATA, STAGES, Work

ROOT = DATA.parent
NEEDED = {
    "torch": "2.13.",
    "transformers": "5.",
    "speculators": "0.9.0",
    "datasets": "",
    "tokenizers": "",
    "tqdm": "",
}
DISK = 1.5  # GB of scratch


def lacking(scratch: Path) -> list[str]:
    """What this environment lacks, in words; empty when the recipe can run."""
    lacks = []
    for name, version in NEEDED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacks.append(f"{name}: not installed")
            continue
        if not found.startswith(version):
            lacks.append(f"{name}: {version}* is needed, {found} is installed")
    if (free := shutil.disk_usage(scratch).free / 1e9) < DISK:
        lacks.append(f"disk: {DISK} GB are needed below {scratch}, {free:.1f} GB are free")
    return lacks


def run(work: Work, again: str | None, until: str | None) -> None:
    """Run the stages that have not been run, in order; `again`: that one and all after it anew."""
    names = list(STAGES)
    if again:
        for name in names[names.index(again) :]:
            (work.scratch / f"done-{name}.json").unlink(missing_ok=True)
    for i, name in enumerate(names, 1):
        done = work.scratch / f"done-{name}.json"
        title = f"[{i}/{len(names)}] {name}"
        if done.exists():
            print(f"{title}: done before", file=sys.stderr)
        else:
            print(f"{title}: {(STAGES[name].__doc__ or '').strip()}", file=sys.stderr)
            began = time.monotonic()
            figures = STAGES[name](work) | {"seconds": round(time.monotonic() - began, 1)}
            done.write_text(json.dumps(figures, indent=2) + "\n")
            print(f"{title}: {json.dumps(figures)}", file=sys.stderr)
        if name == until:
            return


def main(argv: list[str] | None = None) -> int:
    """Returns 0: all is made; 1: the models are not good enough; 2: something needed is missing."""
    listing = "\n".join(f"  {name:10} {(f.__doc__ or '').strip()}" for name, f in STAGES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"stages:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--again", choices=STAGES, metavar="STAGE", help="make this stage and all later ones anew")
    add("--until", choices=STAGES, metavar="STAGE", help="stop after this stage")
    add("--scratch", type=Path, default=ROOT / ".cache/data", help="default: %(default)s")
    add("--data", type=Path, default=DATA, help="folder to install into; default: %(default)s")
    add(
        "--threads",
        type=int,
        default=1,
        help="of torch; default: %(default)s",
    )
    add(
        "--smoke",
        action="store_true",
        help="toys, in a minute, to try the recipe; needs other folders than the real",
    )
    args = parser.parse_args(argv)
    if args.smoke and DATA in (args.data.resolve(), args.scratch.resolve().parent):
        parser.error("--smoke makes toys: give it a --data folder (and a --scratch folder) of its own")
    for folder in (args.scratch, args.data):
        folder.mkdir(parents=True, exist_ok=True)
    if lacks := lacking(args.scratch):
        print(
            "The recipe cannot run here:",
            *lacks,
            "`make data` sets up what it needs.",
            sep="\n  ",
            file=sys.stderr,
        )
        return 2
    os.environ.update(OMP_NUM_THREADS=str(args.threads), TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(ROOT))  # for eaglelab, where it is not installed
    from eaglelab.errors import EaglelabError

    try:
        run(Work(args.scratch.resolve(), args.data.resolve(), args.smoke), args.again, args.until)
    except EaglelabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the stage that was cut off", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
