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

# From the ground up; a package imports only what stands on an earlier line. Siblings of a line know each other not.
LAYERS = [
    ["errors", "log", "stacks"],
    ["plugins"],
    ["config"],
    ["core", "ops", "model_files"],
    ["text"],
    ["grammar"],
    ["parallel"],
    ["layers"],
    ["models"],
    ["worker"],
    ["executor"],
    ["engine"],
    ["sim"],
    ["generation"],
    ["llm"],
    ["bench"],
    ["api"],
    ["batch"],
    ["serving"],
    ["cli"],
]
# What a package needs from two lines away although a plain reading of the order allows more.
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
    return [problem for path in sources() for problem in check_file(path)]


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
    if package == "" or target == package or target == "__version__":
        return
    if _level(target) >= _level(package):
        yield f"{name}:{line}: {package} must not import {module}: it does not stand above it"
    if package == "worker" and target == "core" and module not in WORKER_MAY_USE:
        yield f"{name}:{line}: worker meets core only in {', '.join(sorted(WORKER_MAY_USE))}, not in {module}"


def _package(name: str) -> str:
    if name.endswith("/__main__.py"):
        return "cli"  # A program, wherever it lies.
    parts = name.removeprefix("raylm/").split("/")
    return parts[0].removesuffix(".py").replace("__init__", "") if len(parts) == 1 else parts[0]


def _level(package: str) -> int:
    for index, names in enumerate(LAYERS):
        if package in names:
            return index
    raise KeyError(f"{package} has no place in LAYERS of tests/check_layers.py: give it one")


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
