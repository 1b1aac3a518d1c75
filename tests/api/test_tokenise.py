"""POST /v1/tokenize, /v1/detokenize and GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.text.processor import TextProcessor
from tests.support.openai_fakes import Server

HI = [{"role": "user", "content": "hi"}]


async def post(server: Server, path: str, **fields: Any) -> Any:
    return (await server.http.post(path, json={"model": "tiny", **fields})).json()


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_a_text_and_back(prefix: str) -> None:
    server = Server()
    body = await post(server, f"{prefix}/tokenize", prompt="hé")
    assert body == {"count": 3, "max_model_len": 64, "tokens": list("hé".encode()), "token_strs": None}
    assert await post(server, f"{prefix}/detokenize", tokens=body["tokens"]) == {"prompt": "hé"}
    assert server.generator.requests == []


async def test_token_strs_and_special_tokens() -> None:
    server = Server()
    body = await post(server, "/v1/tokenize", prompt="hi", return_token_strs=True)
    assert body["token_strs"] == ["<68>", "<69>"]
    assert await post(server, "/v1/detokenize", tokens=[104, 256]) == {"prompt": "h<end>"}
    assert await post(server, "/v1/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize("strict", [False, True])
async def test_a_chat_has_the_tokens_of_its_prompt(strict: bool) -> None:
    server = Server(strict=strict)
    body = await post(server, "/v1/tokenize", messages=HI, return_token_strs=True)
    assert bytes(body["tokens"]) == b"user: hi\n>"
    assert len(body["token_strs"]) == body["count"] == 10
    body = await post(server, "/v1/tokenize", messages=HI, add_generation_prompt=False)
    assert bytes(body["tokens"]) == b"user: hi\n"
    await server.chat(max_tokens=1)
    assert bytes(server.generator.requests[0].prompt_ids) == b"user: hi\n>"


async def test_texts_longer_than_the_model_are_counted() -> None:
    body = await post(Server(), "/v1/tokenize", prompt="x" * 100_000)
    assert body["count"] == 100_000 and body["max_model_len"] == 64
    text = await post(Server(), "/v1/detokenize", tokens=[120] * 100_000)
    assert text == {"prompt": "x" * 100_000}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/v1/tokenize", {}, "prompt", "required"),
        ("/v1/tokenize", {"prompt": ["a"]}, "prompt", "string"),
        ("/v1/tokenize", {"prompt": "a", "messages": HI}, "prompt", "together with messages"),
        ("/v1/tokenize", {"messages": []}, "messages", "must not be empty"),
        ("/v1/tokenize", {"messages": HI, "return_token_strs": 1}, "return_token_strs", "must be a boolean"),
        ("/v1/detokenize", {}, "tokens", "required"),
        ("/v1/detokenize", {"tokens": "a"}, "tokens", "list"),
        ("/v1/detokenize", {"tokens": [1, 257]}, "tokens", "token id 257"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens", "token id -1"),
        ("/v1/detokenize", {"tokens": [1] * (2**18 + 1)}, "tokens", "at most 262144"),
    ],
)
async def test_what_is_refused(path: str, fields: dict[str, Any], param: str, words: str) -> None:
    response = await Server().http.post(path, json={"model": "tiny", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


async def test_other_models_and_no_json() -> None:
    server = Server()
    for path in ("/v1/tokenize", "/v1/detokenize"):
        response = await server.http.post(path, json={"model": "nobody", "prompt": "a", "tokens": [1]})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        response = await server.http.post(path, content=b"{")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    error = (await Server(strict=True).http.post("/v1/tokenize", json={"prompt": "a", "foo": 1})).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_field", "foo")


async def test_tokenizer_info() -> None:
    server = Server()
    body = (await server.http.get("/tokenizer_info", params={"model": "tiny"})).json()
    assert body == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "special_tokens": {"eos_token": "<end>"},
        "bos_token_id": None,
        "eos_token_ids": [256],
        "chat_template": "the template",
        "model_max_length": 64,
        "vocab_size": 257,
    }
    assert (await Server(alone=True).http.get("/tokenizer_info")).status_code == 200
    assert (await server.http.get("/tokenizer_info", params={"model": "nobody"})).status_code == 404


async def test_tokenizer_info_wants_an_admin(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text('{"key": "one", "scopes": ["inference"]}\n{"key": "two", "scopes": ["admin"]}\n')
    server = Server(api_keys_file=str(file))
    for key, status in (("one", 403), ("two", 200)):
        headers = {"authorization": f"Bearer {key}"}
        response = await server.http.get("/tokenizer_info", params={"model": "tiny"}, headers=headers)
        assert response.status_code == status


async def test_a_real_tokenizer(smollm: TextProcessor) -> None:
    server = Server(text=smollm, alone=True)
    object.__setattr__(server.catalog.model, "vocab_size", smollm.tokenizer.vocab_size)
    body = await post(server, "/v1/tokenize", prompt="Hello  <|im_end|> wörld", return_token_strs=True)
    assert body["token_strs"][-2:] == smollm.token_names(body["tokens"][-2:])
    assert "<|im_end|>" in body["token_strs"] and "\u0120w" in "".join(body["token_strs"])
    assert await post(server, "/v1/detokenize", tokens=body["tokens"]) == {"prompt": "Hello  <|im_end|> wörld"}
    chat = await post(server, "/v1/tokenize", messages=HI)
    assert chat["tokens"] == smollm.chat(HI)
