"""The tokenizer of a model folder as published on the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from raylm.errors import ConfigError
from raylm.text.cache import convert_once, identity
from raylm.text.definition import TokenizerInfo, add_specials

_VOCABULARY_FILES = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "tiktoken.model",
    "tekken.json",
)
_TEKKEN_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_OTHER_FILES = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
_NEEDED = {"tokenizer.model": "sentencepiece", "spiece.model": "sentencepiece", "tiktoken.model": "tiktoken"}
"""Files -> the packages by which transformers reads them."""


def load_folder(folder: Path, cache_dir: Path | None) -> tuple[Backend, TokenizerInfo]:
    """Read tokenizer.json and what stands beside it.

    A folder without tokenizer.json is converted by transformers, once; the result is kept in the cache folder.
    Raises ConfigError when there is no tokenizer, or a file of it is damaged.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        return _open(path, folder)
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ConfigError(
            f"{folder}: has no tokenizer.json, tokenizer.model, tekken.json or vocab.json, so no tokenizer"
        )
    sources = [folder / name for name in (*_VOCABULARY_FILES, *_OTHER_FILES) if (folder / name).is_file()]
    return convert_once(identity(sources), lambda: _convert(folder), cache_dir)


def _open(path: Path, folder: Path) -> tuple[Backend, TokenizerInfo]:
    try:
        backend = Backend.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a tokenizer: {error}") from None
    return backend, _describe(backend, folder, {})


def _convert(folder: Path) -> tuple[Backend, TokenizerInfo]:
    # Seconds to import, and not needed for any other model.
    from transformers import AutoTokenizer

    if (tekken := folder / "tekken.json").is_file():
        return _convert_tekken(tekken)
    for name, package in _NEEDED.items():
        if (folder / name).is_file() and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{folder}: {name} needs the package {package}: pip install {package}")
    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever a converter trips over, the reader of the message needs the folder
        raise ConfigError(f"{folder}: transformers cannot load this tokenizer: {error}") from None
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"{folder}: transformers knows this tokenizer only in a form without tokenizer.json")
    return backend, _describe(backend, folder, _named_specials(converted.special_tokens_map))


def _convert_tekken(path: Path) -> tuple[Backend, TokenizerInfo]:
    """Mistral's own file. Prompts begin with BOS, as Mistral's own library has them."""
    from transformers.integrations.mistral import MistralConverter

    try:
        backend = MistralConverter(str(path)).converted()
    except Exception as error:  # as above
        raise ConfigError(f"{path}: transformers cannot read this tokenizer: {error!r:.200}") from None
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    named = {name: text for name, text in _TEKKEN_SPECIALS.items() if backend.token_to_id(text) is not None}
    return backend, _describe(backend, path.parent, named)


def _describe(backend: Backend, folder: Path, defaults: dict[str, str]) -> TokenizerInfo:
    """Complete `backend` by tokenizer_config.json, as transformers does, and tell the facts of the tokenizer.

    (Not by its add_bos_token: what goes around a prompt is tokenizer.json's to say, for transformers, too.)
    """
    config = _read_json(folder / "tokenizer_config.json")
    named = defaults | _named_specials(_read_json(folder / "special_tokens_map.json")) | _named_specials(config)
    add_specials(backend, list(named.values()))
    bos, eos = named.get("bos_token"), named.get("eos_token")
    templates = _chat_templates(folder, config)
    return TokenizerInfo(
        special_tokens=named,
        bos_token_id=backend.token_to_id(bos) if bos is not None else None,
        eos_token_ids=_eos_ids(folder, backend.token_to_id(eos) if eos is not None else None),
        chat_template=templates.pop("default", None),
        named_templates=templates,
    )


def _named_specials(config: Mapping[str, object]) -> dict[str, str]:
    """The entries such as "bos_token": "<s>" or "bos_token": {"content": "<s>", ...}."""
    named = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str) and text:
            named[name] = text
    return named


def _eos_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    """generation_config.json's (config.json's where it names none), then the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
        if ids:
            break
    return tuple(dict.fromkeys(ids if eos is None else [*ids, eos]))


def _chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name; the one that is taken without a name is "default"."""
    given = config.get("chat_template")
    if isinstance(given, str):
        given = [{"name": "default", "template": given}]
    named = {}
    for item in given if isinstance(given, list) else []:
        name, template = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if isinstance(name, str) and isinstance(template, str):
            named[name] = template
    if isinstance(template := _read_json(folder / "chat_template.json").get("chat_template"), str):
        named["default"] = template
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        named["default"] = path.read_text(encoding="utf-8")
    return named


def _read_json(path: Path) -> dict[str, object]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    return data if isinstance(data, dict) else {}
