"""Special tokens of a model in grammars: where a mark stands, its token is allowed, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from raylm.core.structure import StructuredOutput
from raylm.grammar.compiled import CompiledGrammars
from raylm.grammar.compiler import GrammarCompiler
from raylm.grammar.matchers import GrammarMatchers
from raylm.grammar.special import SpecialTokens
from raylm.model_files.source import ModelSource
from raylm.text.tokenizer import Tokenizer as RaylmTokenizer

CALL = (
    '{"arguments": "json", "tools": [{"name": "f", "parameters": "{\\"type\\": \\"object\\"}"}], '
    '"before_name": "<|call|>", "after_name": "<|args|>", "call_end": "<|end|>"}'
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Single bytes, two marks that are special tokens, one that is not, and the end."""
    folder = tmp_path_factory.mktemp("marks")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|call|>", "<|args|>", "<|end|>")])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return ModelSource(folder, "folder")


def test_the_marks_of_a_model_are_its_special_tokens_but_those_that_end(source: ModelSource) -> None:
    tokenizer = RaylmTokenizer.load(source)
    found = SpecialTokens.of(tokenizer, tokenizer.vocab_size)
    assert set(found.ids) == {"<|call|>", "<|args|>"} and found.ends == {"<|end|>"}
    assert found.is_end("a<|end|>") and not found.is_end("a<|call|>")


def test_a_compiled_call_allows_them_where_they_stand(source: ModelSource) -> None:
    tokenizer = RaylmTokenizer.load(source)
    size = tokenizer.vocab_size
    compiler = GrammarCompiler(source)
    ready = compiler.compile(StructuredOutput("tool_calls", CALL))
    compiler.close()
    grammars = CompiledGrammars(source, size)
    matchers = GrammarMatchers(grammars, size)
    call, args, end, tool = tokenizer.encode("<|call|><|args|><|end|><tool>", add_special_tokens=False)
    matchers.begin(0, ready, [end])

    def allowed() -> set[int]:
        masks = np.zeros((1, matchers.num_words), np.int32)
        assert not matchers.fill([0], [[]], masks).broken
        return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")[:size]).tolist())

    seen = [allowed()]
    for token in [call, *tokenizer.encode("f"), args, *tokenizer.encode('{"a": "x'), *tokenizer.encode('"}'), end]:
        assert token in seen[-1], tokenizer.decode([token])
        matchers.accept(0, [token])
        seen.append(allowed() if token != end else set())
    assert seen[0] == {call} and seen[2] == {args}
    in_string = seen[11]
    assert tool in in_string, "a token with text is text"
    assert not in_string & {call, args, end}
    grammars.close()
