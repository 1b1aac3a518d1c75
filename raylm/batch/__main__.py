"""python -m raylm.batch: the command `raylm batch`, as jobs start it."""

from __future__ import annotations

import sys

from raylm.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
