"""Shared by all tests: helpers next to this file can be imported by their names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import Phase, settings

sys.path.insert(0, str(Path(__file__).parent))

# Ray reads these when it is first imported, by whichever test does so first.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

settings.register_profile("ci", max_examples=300, deadline=None)
settings.register_profile("nightly", max_examples=10_000, deadline=None)
settings.register_profile("unshrunk", max_examples=1_000, deadline=None, phases=[Phase.generate])
settings.load_profile("ci")
