"""Packages of clients, which the extra `clients` names; `make clients` installs them."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest


def client_package(name: str) -> ModuleType:
    """The module of a client. Without its package the importing test file is skipped; what the package itself warns of
    when it is imported is its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = pytest.importorskip(name, reason=f"needs {name}: make clients")
    return module
