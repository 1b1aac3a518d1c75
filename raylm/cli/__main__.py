"""python -m raylm.cli"""

from __future__ import annotations

import sys

from raylm.cli import main

if __name__ == "__main__":
    sys.exit(main())
