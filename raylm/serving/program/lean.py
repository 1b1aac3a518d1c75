"""Imported first by every process of `raylm serve`, so that Serve comes without pandas.

Serve's utilities import pandas where it is installed, to know a data frame when a response is one. That is a quarter of
Serve's import and some 50 MB, in each of six processes. Whoever else imports pandas gets it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

_IMPORTER = "ray.serve._private.utils"


class _WithoutPandas(MetaPathFinder):
    """Says to Serve that there is no pandas."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas" and _importer(sys._getframe(1)) == _IMPORTER:
            raise ModuleNotFoundError("raylm keeps pandas out of Serve", name=name)
        return None


def _importer(frame: FrameType | None) -> str:
    """The module whose import statement runs."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


sys.meta_path.insert(0, _WithoutPandas())
