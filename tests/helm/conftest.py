from __future__ import annotations

import sys
from pathlib import Path

# The program that writes values.schema.json.
sys.path.insert(0, str(Path(__file__).parents[2] / "helm"))
