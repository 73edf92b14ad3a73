"""`python tests/faultbench`: run the fault bench."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this folder is the package `faultbench`

from faultbench.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
