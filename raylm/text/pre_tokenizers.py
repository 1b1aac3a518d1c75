"""How a byte-level vocabulary's text is cut before its merges apply: the values of `tokenizer.ggml.pre`.

The patterns are those of the models' published tokenizers; a name's group, and whether the group keeps whole words
of the vocabulary unmerged and opens prompts with BOS, are llama.cpp's (llama_vocab::impl::load).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text.

    pattern: the pieces' regular expression; None is GPT-2's, which the tokenizers library has built in.
    single_digits: every digit is a piece, cut before the pattern looks at the text.
    nfc: text is put into Unicode's composed form first.
    ignore_merges: a piece that is a token is taken as it is.
    add_bos: prompts begin with BOS where the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def install(self, backend: Backend) -> None:
        """Give `backend` this normalizer and pre-tokenizer."""
        if self.nfc:
            backend.normalizer = normalizers.NFC()
        stages: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            stages.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            stages.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        backend.pre_tokenizer = stages[0] if len(stages) == 1 else pre_tokenizers.Sequence(stages)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"


def _cased(end: str, digits: str) -> str:
    words = _CASED.replace("{end}", end)
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _uncased(letters: str, digits: str) -> str:
    rest = r"\p{L}\p{M}" if r"\p{M}" in letters else r"\p{L}"
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{rest}\p{{N}}]+[\r\n]*|{_SPACES}"


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3 = PreTokenizer(_uncased(r"\p{L}", r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_GLM4 = PreTokenizer(_LLAMA3.pattern)
_QWEN2 = PreTokenizer(_uncased(r"\p{L}", r"\p{N}"), nfc=True)
_QWEN35 = PreTokenizer(_uncased(r"[\p{L}\p{M}]", r"\p{N}"), nfc=True)
_TEKKEN = PreTokenizer(_cased("", r"\p{N}"), ignore_merges=True)
_GPT4O = PreTokenizer(_cased(rf"{_CONTRACTIONS}?", r"\p{N}{1,3}"))

PRE_TOKENIZERS = {
    "default": _GPT2,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _GLM4),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
