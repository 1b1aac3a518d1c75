"""Runs vLLM's own tests of parsers, out of its source distribution, against raylm's reader; prints what share passes.

python -m tests.generation.vllm_parsers [FOLDER]        FOLDER: a distribution, unpacked; else the newest is fetched

Tests of formats that raylm has not, of grammars and of requests are left out; tests that look inside vLLM's parsers or
need its tokenizers are skipped. The exit code is 1 below the share that is expected.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

EXPECTED_SHARE = 0.95
_INDEX = "https://pypi.org/simple/vllm/"
_TOOLS = (
    "deepseekv3", "deepseekv31", "functiongemma", "glm4_moe", "glm47_moe", "granite", "granite4", "hermes", "kimi_k2",
    "llama3_json", "llama4_pythonic", "pythonic", "qwen3coder",
)  # fmt: skip
_REASONING = ("deepseekr1", "deepseekv3", "glm4_moe", "granite", "qwen3", "kimi_k2", "gptoss")
FILES = (
    *(f"tests/tool_parsers/test_{name}_tool_parser.py" for name in _TOOLS),
    *(f"tests/reasoning/test_{name}_reasoning_parser.py" for name in _REASONING),
    "tests/parser/mistral/test_tool_calls.py",
)
# These ask for what is elsewhere: grammars, requests, prompts, Mistral's own tokenizer, the class that reads a format.
_NOT_OF_TEXT = (
    "adjust_request", "structural_tag", "grammar", "guided", "glm53_template", "glm47_template", "full_prompt",
    "no_think_block_no_leak", "uses_shared", "single_tool_add-", "single_tool_add_strings-", "multiple_tools-legacy",
    "multiple_tools-engine",
)  # fmt: skip


def main(folder: str = "") -> int:
    with tempfile.TemporaryDirectory() as made:
        source = Path(folder) if folder else _fetched(Path(made))
        work = Path(made) / "work"
        _copied(source, work)
        return _share(_run(work))


def _fetched(folder: Path) -> Path:
    """The newest source distribution of the package index, unpacked as far as its tests."""
    with urlopen(_INDEX, timeout=60) as page:
        links = re.findall(r'href="([^"#]*/vllm-([0-9.]+)\.tar\.gz)', page.read().decode())
        link, _ = max(links, key=lambda found: [int(part) for part in found[1].split(".")])
        address = urljoin(page.url, link)
    print(f"vLLM's tests of {address.rpartition('/')[2]}")
    with urlopen(address, timeout=600) as stream, tarfile.open(fileobj=stream, mode="r|gz") as archive:
        archive.extractall(folder, members=_tests_of(archive), filter="data")
    return next(path for path in folder.iterdir() if path.name.startswith("vllm-"))


def _tests_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        if re.match(r"[^/]+/tests/(tool_parsers|reasoning|parser)/", member.name):
            yield member


def _copied(source: Path, work: Path) -> None:
    """The files, and the helpers beside them, as a package of tests of its own."""
    (work / "tests").mkdir(parents=True)
    (work / "tests" / "__init__.py").touch()
    for folder in ("tool_parsers", "reasoning", "parser"):
        shutil.copytree(source / "tests" / folder, work / "tests" / folder)
    stand_in = Path(__file__).with_name("vllm_stand_in.py")
    (work / stand_in.name).write_bytes(stand_in.read_bytes())


def _run(work: Path) -> str:
    options = ["-q", "-p", "vllm_stand_in", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(work)]
    left_out = " and ".join(f"not {name}" for name in _NOT_OF_TEXT)
    files = [name for name in FILES if (work / name).exists()]
    project = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "pytest", *options, "--tb=line", "-k", left_out, *files]
    paths = os.pathsep.join([str(work), project])
    done = subprocess.run(
        command, cwd=work, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def _share(output: str) -> int:
    """Prints what failed, and the share that passed of what ran."""
    for line in output.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(line)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", output)}
    ran = counts.get("passed", 0) + sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    if not ran:
        print(output)
        return 1
    share = counts.get("passed", 0) / ran
    print(f"{counts.get('passed', 0)} of {ran} pass: {share:.1%}; {counts.get('skipped', 0)} need vLLM itself")
    return 0 if share >= EXPECTED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
