"""The image's recipe: what it installs is what raylm and the chart's examples import, compiled."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from fsspec.registry import known_implementations
from packaging.requirements import Requirement

from tests.helm import rendered

DOCKERFILE = rendered.ROOT / "deployments" / "Dockerfile"
PROJECT = tomllib.loads((rendered.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {
    # Not in every environment of the tests.
    **{"cupy": "cupy-cuda13x", "s3fs": "s3fs", "gcsfs": "gcsfs"},
    **{
        module: names[0].lower().replace("_", "-")
        for module, names in importlib.metadata.packages_distributions().items()
    },
}
NOT_IN_THE_IMAGE = {
    "matplotlib": "figures of raylm bench and simulate (extra plot), which name it where it is missing",
}


def instructions() -> list[tuple[str, str]]:
    """The recipe's instructions and their arguments, lines joined and comments dropped."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.strip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def installed_by_uv(run: str, folder: Path, torch_backend: str) -> list[list[str]]:
    """What a RUN instruction would tell uv: it is run by a shell with a uv that notes its arguments."""
    fake, log = folder / "uv", folder / "log"
    fake.write_text('#!/bin/sh\necho "$@" >> "$UV_LOG"\n', encoding="utf-8")
    fake.chmod(0o755)
    log.write_text("", encoding="utf-8")
    env = {"PATH": f"{folder}{os.pathsep}{os.defpath}", "UV_LOG": str(log), "TORCH_BACKEND": torch_backend}
    subprocess.run(["/bin/sh", "-ec", run], env={**env, "TORCH_VERSION": "2.13.0"}, check=True, cwd=folder)
    return [line.split() for line in log.read_text(encoding="utf-8").splitlines()]


def extras_of_the_image(folder: Path, torch_backend: str) -> set[str]:
    (run,) = (rest for word, rest in instructions() if word == "RUN" and "--requirement pyproject.toml" in rest)
    words = installed_by_uv(run, folder, torch_backend)[-1]
    assert words[words.index("--requirement") + 1] == "pyproject.toml"
    return {following for word, following in zip(words, words[1:], strict=False) if word == "--extra"}


def named(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~;, (]", one, maxsplit=1)[0].lower().replace("_", "-") for one in requirements}


def contents(extras: set[str]) -> set[str]:
    """The distributions that raylm's own requirements and these extras name."""
    assert extras <= PROJECT["optional-dependencies"].keys()
    return named(PROJECT["dependencies"] + [one for extra in extras for one in PROJECT["optional-dependencies"][extra]])


def imported_by_raylm() -> set[str]:
    """The packages of others that raylm imports anywhere, in functions too."""
    found = set()
    for path in (rendered.ROOT / "raylm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"raylm"}


def test_the_image_has_what_raylm_imports(tmp_path):
    has = contents(extras_of_the_image(tmp_path, "cu130"))
    # uvloop is one of ray[serve]'s, and its import has another way out.
    missing = {module for module in imported_by_raylm() - {"uvloop"} if DISTRIBUTIONS[module] not in has}
    assert missing == NOT_IN_THE_IMAGE.keys()


def test_an_image_for_cpus_lacks_nothing_but_nccl(tmp_path):
    gpu, cpu = extras_of_the_image(tmp_path, "cu130"), extras_of_the_image(tmp_path, "cpu")
    assert contents(gpu) - contents(cpu) == {"cupy-cuda13x"}
    # CuPy is made for one CUDA; another one's would not find its libraries.
    assert extras_of_the_image(tmp_path, "cu128") == cpu


def locked() -> list[tuple[str, list[str]]]:
    """Each requirement of the lock with its options."""
    text = (rendered.ROOT / "deployments" / "constraints.txt").read_text(encoding="utf-8")
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    return [(words[0], words[1:]) for words in map(str.split, lines.replace("\\\n", " ").splitlines())]


def pinned() -> dict[str, str]:
    lines = [requirement.partition("==") for requirement, _ in locked()]
    assert all(middle and version for _, middle, version in lines)
    return {name.partition("[")[0]: version for name, _, version in lines}


def test_every_file_of_the_image_has_its_hash():
    for requirement, options in locked():
        assert options, requirement
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", option) for option in options), requirement
    assert "no-verify-hashes" not in DOCKERFILE.read_text(encoding="utf-8"), "uv compares by itself"


def test_what_the_image_has_is_pinned(tmp_path):
    """But for torch, which the build names; so that an image of tomorrow is that of today."""
    has = {name for name in contents(extras_of_the_image(tmp_path, "cu130"))}
    assert has - pinned().keys() == {"torch"}
    for run in (rest for word, rest in instructions() if word == "RUN" and "--torch-backend" in rest):
        assert run.count("--torch-backend") == run.count("--constraints constraints.txt")
    wanted = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    for requirement in map(Requirement, wanted):
        version = pinned().get(requirement.name.lower().replace("_", "-"))
        assert version is None or requirement.specifier.contains(version), requirement


def test_the_images_ray_is_the_one_that_the_chart_names():
    values = yaml.safe_load((rendered.CHART / "values.yaml").read_text(encoding="utf-8"))
    assert pinned()["ray"] == values["rayVersion"]


def schemes() -> set[str]:
    """The kinds of URL that the chart's examples and the page on batches use."""
    examples = [path.read_text(encoding="utf-8") for path in rendered.EXAMPLES.values()]
    docs = (rendered.ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
    return set(re.findall(r"\b(s3|gs|gcs|hf|abfs|az)://", "\n".join([*examples, docs])))


@pytest.mark.parametrize("scheme", sorted(schemes()))
def test_batches_reach_their_object_stores(scheme, tmp_path):
    module = known_implementations[scheme]["class"].partition(".")[0]
    has = contents(extras_of_the_image(tmp_path, "cpu"))
    brought_along = named(importlib.metadata.requires("transformers") or [])
    assert {"s3", "gs"} <= schemes() and DISTRIBUTIONS[module] in has | brought_along


def test_ray_data_is_asked_for(tmp_path):
    extras = extras_of_the_image(tmp_path, "cpu")
    asked = [one for extra in extras for one in PROJECT["optional-dependencies"][extra]]
    assert any(re.match(r"ray\[.*\bdata\b.*\]", one) for one in asked)


def test_the_build_imports_what_only_batches_and_stores_need():
    """So a build fails where an installation gave something that cannot be imported."""
    (check,) = (rest for word, rest in instructions() if word == "RUN" and 'python -c "import' in rest)
    said = re.search(r'python -c "import (.+?)"', check).group(1)
    assert set(re.split(r"[,; ]+(?:import )?", said)) == {
        *("gcsfs", "pyarrow", "ray.data", "s3fs", "raylm.batch", "raylm.serving.app"),
    }


def test_whatever_is_installed_is_compiled():
    """The chart runs it on a read-only file system, where Python cannot keep what it compiles."""
    compiles = {}
    for word, rest in instructions():
        if word == "FROM":
            base, _, stage = rest.partition(" AS ")
            compiles[stage] = compiles.get(base, False)
        elif word == "ENV":
            compiles[stage] |= "UV_COMPILE_BYTECODE=1" in rest.split()
            assert "PYTHONPYCACHEPREFIX" not in rest
        elif word == "RUN" and re.search(r"\buv (pip|python) install\b", rest):
            assert compiles[stage] and "--no-compile" not in rest, rest
    copied = [rest for word, rest in instructions()]
    # raylm is used where it lies, so installing it compiles nothing.
    install = next(place for place, rest in enumerate(copied) if "--editable ." in rest)
    assert "python -m compileall -q raylm" in copied[install] and "raylm raylm" in copied[:install]


def test_serve_starts_the_front_that_the_build_has_written():
    written = [match for word, rest in instructions() if (match := re.search(r"raylm front (\S+)", rest))]
    (environment,) = (
        rest for word, rest in instructions() if word == "ENV" and "RAY_SERVE_HAPROXY_BINARY_PATH" in rest
    )
    assert f"RAY_SERVE_HAPROXY_BINARY_PATH={written[0][1]}" in environment.split() and len(written) == 1


def test_the_linter_passes_the_dockerfile():
    program = Path(sys.executable).with_name("hadolint")
    command = [program, "--failure-threshold", "style", str(DOCKERFILE)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_dockerfile_takes_what_is_there_and_what_docker_is_sent():
    sent = (rendered.ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    roots = {name.partition("/")[0] for name in names}
    assert {"pyproject.toml", "raylm", "cuda_ext", "configs", "deployments", "README.md"} == roots
    for name in names:
        assert (rendered.ROOT / name).exists() and f"!{name.partition('/')[0]}" in sent
    assert "\nUSER 1000:1000\n" in DOCKERFILE.read_text(encoding="utf-8")


def test_a_change_of_raylm_makes_no_layer_of_gigabytes():
    stage, into_venv = "", set()
    copied = {}
    for word, rest in instructions():
        if word == "FROM":
            stage = rest.partition(" AS ")[2]
        elif word == "RUN" and re.search(r"\buv pip install\b", rest) and "--prefix /opt/raylm/prefix" not in rest:
            into_venv.add(stage)
        elif word == "COPY" and stage == "" and rest.startswith("--from="):
            source, path, _ = rest.split()
            copied[path] = source.removeprefix("--from=")
    assert copied == {"/opt/python": "environment", "/opt/venv": "environment", "/opt/raylm": "package"}
    # What the kernels are built with stays in their stage.
    assert into_venv == {"environment", "kernels"}
