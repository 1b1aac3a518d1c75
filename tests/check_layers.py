"""The rules of the house: which package may import which, and how long files and functions may be.

python tests/check_layers.py        prints what breaks a rule; exit code 1 when anything does
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

_GROUND = {"errors", "garbage", "log", "stacks"}
# Package -> those of the house that it may import, beside the ground. A package stands below all that it imports.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "garbage": set(),
    "log": set(),
    "stacks": set(),
    "plugins": set(),
    "config": {"plugins"},
    "core": {"plugins", "config"},
    "ops": set(),
    "model_files": {"config"},
    "text": {"config", "core", "model_files"},
    "grammar": {"core", "model_files", "text"},
    "parallel": {"config", "ops"},
    "layers": {"ops", "parallel"},
    "models": {"plugins", "config", "ops", "model_files", "parallel", "layers"},
    "worker": {"config", "core", "ops", "model_files", "grammar", "parallel", "layers", "models"},
    "planning": {"config", "layers", "models", "worker"},
    "executor": {"config", "core", "parallel", "models", "worker"},
    "engine": {"config", "core", "model_files", "text", "executor"},
    "sim": {"config", "core", "engine"},
    "generation": {"plugins", "config", "core", "text", "grammar"},
    "api": {"plugins", "config", "core", "text", "generation"},
    "llm": {"config", "core", "model_files", "text", "grammar", "engine", "generation", "api"},
    "bench": {
        *("config", "core", "ops", "model_files", "text", "parallel", "layers", "models"),
        *("executor", "engine", "sim", "llm"),
    },
    "batch": {"config", "model_files", "text", "grammar", "models", "executor", "engine", "generation", "api"},
    "serving": {
        *("plugins", "config", "core", "model_files", "text", "grammar", "models"),
        *("executor", "engine", "sim", "generation", "api"),
    },
    "cli": {
        *("config", "core", "ops", "model_files", "layers", "models", "worker", "planning"),
        *("sim", "llm", "bench", "batch", "serving"),
    },
}
# Packages of others that a package must not import.
NEVER = {
    "core": {"torch", "ray", "numpy", "zmq", "time"},
    "config": {"torch", "ray", "transformers"},
    "model_files": {"torch", "ray", "transformers"},
    "text": {"torch", "ray"},
    "grammar": {"torch", "ray", "transformers", "xgrammar"},
    "engine": {"torch"},
    "sim": {"torch", "ray", "numpy", "time"},
    "generation": {"torch", "ray", "starlette"},
    "api": {"torch", "ray", "starlette"},
}
# Who may import a package that the others must not.
ONLY_IN = {
    "ray": ["raylm/executor/ray.py", "raylm/executor/peers.py", "raylm/executor/cluster.py",
            "raylm/executor/local_ray.py", "raylm/executor/local_head.py", "raylm/engine/", "raylm/serving/",
            "raylm/batch/", "raylm/bench/", "raylm/cli"],
    "ray.serve": ["raylm/serving/"],
    "fastapi": ["raylm/serving/"],
    "starlette": ["raylm/serving/"],
}  # fmt: skip
# raylm.worker meets raylm.core only in the values of a step, and in how they are counted.
WORKER_MAY_USE = {
    "raylm.core.control",
    "raylm.core.rows",
    "raylm.core.sampling",
    "raylm.core.step",
    "raylm.core.structure",
}


def problems() -> list[str]:
    """Every broken rule, as a line that names the place."""
    return [*_circles(), *(problem for path in sources() for problem in check_file(path))]


def _circles() -> list[str]:
    """ARROWS lists packages from the ground up: an arrow to one that comes later would close a circle."""
    seen: set[str] = set()
    found = []
    for package, targets in ARROWS.items():
        found += [f"ARROWS: {package} must not import {target}, which comes later" for target in targets - seen]
        seen.add(package)
    return found


def sources() -> list[Path]:
    return sorted(path for folder in ("raylm", "tests") for path in (ROOT / folder).rglob("*.py"))


def check_file(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    yield from _sizes(name, text, tree)
    if name.startswith("raylm/"):
        yield from _imports(name, tree)


def _sizes(name: str, text: str, tree: ast.Module) -> Iterator[str]:
    if (lines := text.count("\n")) > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def _imports(name: str, tree: ast.Module) -> Iterator[str]:
    package = _package(name)
    for line, module in _imported_modules(tree):
        if module.startswith("raylm."):
            yield from _house_import(name, package, line, module)
        top = module.split(".")[0]
        if top in NEVER.get(package, ()):
            yield f"{name}:{line}: {package} must not import {top}"
        for guarded, homes in ONLY_IN.items():
            inside = module == guarded or module.startswith(guarded + ".")
            if inside and not any(name.startswith(home) for home in homes):
                yield f"{name}:{line}: {guarded} belongs to {', '.join(homes)}"


def _house_import(name: str, package: str, line: int, module: str) -> Iterator[str]:
    target = module.split(".")[1]
    if package == "" or target == package or target == "__version__" or target in _GROUND:
        return
    if package not in ARROWS:
        yield f"{name}: {package} has no place in ARROWS of tests/check_layers.py: give it one"
    elif target not in ARROWS[package]:
        yield f"{name}:{line}: {package} must not import {module}: ARROWS of tests/check_layers.py has no arrow to it"
    if package == "worker" and target == "core" and module not in WORKER_MAY_USE:
        yield f"{name}:{line}: worker meets core only in {', '.join(sorted(WORKER_MAY_USE))}, not in {module}"


def _package(name: str) -> str:
    if name.endswith("/__main__.py"):
        return "cli"  # A program, wherever it lies.
    parts = name.removeprefix("raylm/").split("/")
    return parts[0].removesuffix(".py").replace("__init__", "") if len(parts) == 1 else parts[0]


def _imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "raylm":
                for alias in node.names:
                    yield node.lineno, f"raylm.{alias.name}"
            else:
                yield node.lineno, node.module


if __name__ == "__main__":
    found = problems()
    print("\n".join(found) or "the house is in order")
    sys.exit(bool(found))
