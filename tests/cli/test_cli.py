from __future__ import annotations

import builtins
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import raylm.llm
from raylm.cli import main, make_parser
from raylm.cli.chat import Chat, LocalSpeaker
from raylm.cli.options import engine_config, given_sampling, sampling_params
from raylm.cli.server import ServerSpeaker
from raylm.core.sampling import SamplingParams
from raylm.errors import ConfigError, RaylmError
from raylm.ops import extension
from raylm.serving.front.install import FrontGiven
from raylm.serving.program.serve_file import HttpGiven
from tests.support import checkpoints
from tests.support.fake_llm import FakeLLM
from tests.support.openai_server import FakeServer


@pytest.fixture
def fake_llm(monkeypatch):
    monkeypatch.setattr(raylm.llm, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM.made


def test_version_and_help(capsys):
    for words in (["--version"], ["bench", "serve", "--help"], ["--help"]):
        with pytest.raises(SystemExit) as exit_:
            main(words)
        assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"raylm {raylm.__version__}\n")
    assert all(command in out for command in ("serve", "generate", "chat", "bench", "convert", "doctor"))


def test_starting_the_command_imports_nothing_heavy():
    code = (
        "import sys, raylm.cli; raylm.cli.make_parser(); print({'torch', 'ray', 'httpx', 'pydantic'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["generate", "./nothing/here", "hi"], "model.path './nothing/here' does not exist"),
        (["generate", "m", "hi", "--temperature", "-1"], "temperature must be a number in [0, 100], got -1.0"),
        (["generate", "m", "hi", "--max-num-seqs", "0"], "key 'scheduler.max_num_seqs' has the value 0"),
        (["chat"], "chat needs a MODEL, or --url"),
        (["chat", "--url", "nowhere"], "--url 'nowhere' must be an address"),
        (["bench", "throughput", "m", "--case", "x"], "--case 'x' must be"),
        (["bench", "throughput", "m", "--dataset", "x", "--case", "a:1:1:1"], "leave out --case"),
        (["bench", "startup"], "needs a MODEL, or --serve"),
        (["bench", "all-reduce", "--ranks", "9"], "needs 2 to 8 GPUs: --ranks is 9"),
        (["bench", "serve", "--url", "http://127.0.0.1:9/v1"], "did not answer"),
        (["bench", "serve", "--api-key-file", "no/keys"], "--api-key-file is 'no/keys', which cannot be read"),
        (["bench", "latency", "m", "--plot", "x.txt"], "must end with .png"),
        (["convert", "./nothing/here", "out", "--quantization", "fp8"], "MODEL './nothing/here' does not exist"),
        (
            ["convert", "m", "out", "--quantization", "fp8", "--group-size", "32"],
            "--group-size is for --quantization int4",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, problem, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("raylm: ") and captured.err.count("\n") == 1
    assert problem in captured.err


@pytest.mark.parametrize("option", ["--api-key", "--api-keys", "--api-key=sesame"])
def test_a_key_on_the_command_line_is_not_repeated(option, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["serve", "smollm2-135m", option, *([] if "=" in option else ["sesame"])])
    assert exit_.value.code == 2
    told = capsys.readouterr()
    assert "--api-keys-file FILE" in told.err
    assert "sesame" not in told.err + told.out


@pytest.mark.parametrize(
    "words",
    [
        ["--log-l=INFO", "serve", "m"],
        ["serve", "m", "--api-keys-f", "keys"],
        ["generate", "m", "hi", "--temp", "0"],
        ["bench", "latency", "m", "--rep", "2"],
    ],
)
def test_options_have_no_short_forms(words, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(words)
    assert "unrecognized arguments" in capsys.readouterr().err


def parsed(*words):
    return make_parser().parse_args(["generate", *words, "hi"])


def test_options_override_the_configuration(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("model: {path: some/model, dtype: float16}\nscheduler: {max_num_seqs: 7}\n")
    config = engine_config(parsed("--dtype", "float32", "--num-threads", "3", str(path)))
    assert (config.model.path, config.model.dtype) == ("some/model", "float32")
    assert (config.scheduler.max_num_seqs, config.runtime.num_threads) == (7, 3)
    assert engine_config(parsed("some/model")).model.path == "some/model"
    assert engine_config(parsed("--chat-template", "zephyr", "some/model")).model.chat_template == "zephyr"


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["bench", "throughput"], ["bench", "startup"]])
def test_workers_are_asked_for_in_every_command_that_loads_a_model(command, tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("model: {path: some/model}\nparallel: {tensor: 4, stage_layers: [3, 1], pipeline: 2}\n")

    def config(*words):
        return engine_config(
            make_parser().parse_args([*command, str(path), *words, *(["hi"] if command == ["generate"] else [])])
        )

    assert config() == config("--tensor", "4") and not config().runtime.ray_workers
    assert config("--tensor", "2", "--ray-workers").parallel.num_workers == 4
    assert config("--ray-workers").runtime.ray_workers
    with pytest.raises(ConfigError, match="stage_layers must hold 3 numbers"):
        config("--pipeline", "3")


@pytest.mark.parametrize(
    ("text", "problem"),
    [("- a\n", "a mapping is expected, not list"), ("model: 3\n", "key 'model'"), ("model: {pat: x}\n", "mean 'path'")],
)
def test_a_wrong_configuration_file_is_named(tmp_path, text, problem):
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="engine.yaml") as error:
        engine_config(parsed("--dtype", "float32", str(path)))
    assert problem in str(error.value)


def test_sampling_options():
    args = parsed("--presence-penalty", "-1", "--frequency-penalty", "0.5", "--repetition-penalty", "1.1", "m")
    params = sampling_params(args, engine_config(args), max_tokens=9)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.0, 0.5, 1.1)
    args = parsed("--typical-p", "0.5", "--min-tokens", "2", "--bad-word", "a", "--bad-word", "b", "m")
    params = sampling_params(args, engine_config(args), max_tokens=9)
    assert (params.typical_p, params.min_tokens, params.bad_words) == (0.5, 2, ("a", "b"))
    args = parsed("--top-k", "5", "--stop", "a", "--stop", "b", "--seed", "0", "m")
    assert given_sampling(args) == {"top_k": 5, "seed": 0, "stop": ["a", "b"]}
    expected = SamplingParams(top_k=5, seed=0, stop=("a", "b"), max_tokens=9)
    assert sampling_params(args, engine_config(args), max_tokens=9) == expected


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_sampling_that_is_not_given_is_the_models_own(fake_llm, monkeypatch, command):
    lines = iter(["Hi", "/exit"] * 2)
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    prompt = ["Hi"] if command == "generate" else []
    assert main([command, "smollm2-135m", *prompt]) == 0
    assert main([command, "smollm2-135m", "--temperature", "0", *prompt]) == 0
    asked = [(llm.streamed[0][1] if command == "chat" else llm.calls[0][1][0]) for llm in fake_llm]
    assert [(params.temperature, params.top_p) for params in asked] == [(0.2, 0.9), (0.0, 0.9)]


def test_generate_prints_text_or_json(fake_llm, capsys):
    assert main(["generate", "m", "one", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "www\n"
    assert main(["generate", "m", "one", "two", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "onewww\ntwowww\n"
    assert main(["generate", "m", "one", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "prompt": "one",
        "index": 0,
        "text": "www",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "output_tokens": 3,
    }
    assert len(fake_llm) == 3 and all(llm.closed for llm in fake_llm)


def test_bench_throughput_prints_json_and_a_table(fake_llm, capsys, tmp_path):
    path = tmp_path / "out.jsonl"
    assert main(["bench", "throughput", "m", "--case", "a:2:3:4", "--case", "b:2:3:4-6", "--output", str(path)]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["bench"], row["case"], row["output_len"]) for row in rows] == [
        ("throughput", "a", 4),
        ("throughput", "b", "4-6"),
    ]
    assert path.read_text() == captured.out
    assert "throughput fake" in captured.err
    assert fake_llm[0].closed


def test_a_dataset_is_not_repeated(fake_llm, capsys, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "abc", "output_len": 2}')
    assert main(["bench", "latency", "m", "--dataset", str(path), "--repeat", "2"]) == 2
    assert "prefix cache" in capsys.readouterr().err
    assert main(["bench", "latency", "m", "--dataset", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["case"] == "x"


def test_bench_serve_asks_the_first_model(capsys):
    with FakeServer(models=["mine"]).running() as server:
        words = ["bench", "serve", "--url", server.url, "--case", "a:3:2:4", "--concurrency", "1,2"]
        assert main([*words, "--goodput", "e2e:1000000", "--request-rate", "1000,inf"]) == 0
        assert {body["model"] for _, body in server.requests} == {"mine"}
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    loads = [(row["request_rate"], row["concurrency"]) for row in rows]
    assert loads == [(1000, 1), (1000, 2), ("inf", 1), ("inf", 2)]
    assert all(row["model"] == "mine" and row["failed"] == 0 and row["goodput"] > 0 for row in rows)


@pytest.mark.parametrize("option", ["--api-key", "--api-key-file", "OPENAI_API_KEY"])
def test_the_key_goes_with_every_request(option, tmp_path, monkeypatch, capsys):
    path = tmp_path / "keys"
    path.write_text("# the first one counts\nmine\nanother\n")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    key = {"--api-key": [option, "mine"], "--api-key-file": [option, str(path)]}.get(option, [])
    if not key:
        monkeypatch.setenv(option, "mine")
    lines = iter(["Hi", "/exit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    with FakeServer().running() as server:
        assert main(["bench", "serve", "--url", server.url, "--case", "a:3:2:4", *key]) == 0
        assert main(["chat", "--url", server.url, *key]) == 0
        paths = [path for path, _ in server.requests]
        assert "/v1/completions" in paths and paths[-1] == "/v1/chat/completions"
        # These, and the two times that models were listed.
        assert server.authorizations == ["bearer mine"] * (len(paths) + 2)
        server.authorizations.clear()
        monkeypatch.setenv("OPENAI_API_KEY", "")
        assert main(["bench", "serve", "--url", server.url, "--case", "a:1:2:4"]) == 0
        assert {*server.authorizations} == {""}


@pytest.mark.parametrize("words", [["--concurrency", "0"], ["--request-rate", "-1"], ["--concurrency", "x"]])
def test_wrong_loads_are_usage_errors(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "serve", *words])
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err


class Speaker:
    name = "someone"

    def __init__(self, answers):
        self.answers = answers
        self.heard = []
        self.closed = 0

    def answer(self, messages):
        self.heard.append([dict(message) for message in messages])
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.closed += 1


def talk(monkeypatch, lines, speaker, **kwargs):
    feed = iter(lines)

    def read(prompt):
        line = next(feed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read)
    chat = Chat(speaker, **kwargs)
    assert chat.run() == 0
    return chat


def test_a_conversation_remembers_and_forgets(monkeypatch, capsys):
    speaker = Speaker([["Hel", "lo"], ["Fine"], ["Who?"]])
    lines = ["Hi", "", "How are you?", KeyboardInterrupt(), "/clear", "/what", "Again", "/exit", "unread"]
    chat = talk(monkeypatch, lines, speaker, system="Be brief")
    system = {"role": "system", "content": "Be brief"}
    assert [message["content"] for message in speaker.heard[1]] == ["Be brief", "Hi", "Hello", "How are you?"]
    assert speaker.heard[2] == [system, {"role": "user", "content": "Again"}]
    assert chat.messages[-1] == {"role": "assistant", "content": "Who?"}
    out = capsys.readouterr().out
    assert "Hello\n" in out and "unknown command /what" in out


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(monkeypatch):
    speaker = Speaker([["Hel", KeyboardInterrupt(), "never"], ["On"]])
    chat = talk(monkeypatch, ["Hi", "Go on"], speaker)
    assert speaker.closed == 2
    assert [message["content"] for message in chat.messages] == ["Hi", "Hel", "Go on", "On"]


def test_a_refused_message_is_forgotten(monkeypatch, capsys):
    chat = talk(monkeypatch, ["Hi", "Ho"], Speaker([[RaylmError("too long")], ["Yes"]]))
    assert [message["content"] for message in chat.messages] == ["Ho", "Yes"]
    assert "[too long]" in capsys.readouterr().out


def test_a_local_speaker_stops_between_steps(fake_llm):
    llm = FakeLLM()
    speaker = LocalSpeaker(llm, SamplingParams(max_tokens=4))
    messages = [{"role": "user", "content": "abc"}]
    assert list(speaker.answer(messages)) == ["Hel", "lo"]
    before = signal.getsignal(signal.SIGINT)
    answer = speaker.answer(messages)
    assert next(answer) == "Hel"
    signal.raise_signal(signal.SIGINT)
    assert list(answer) == []
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.streamed[0][0] == llm.text.encode("abc")


def test_chat_with_a_model(fake_llm, monkeypatch, capsys):
    lines = iter(["Hi", "/exit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    assert main(["chat", "m", "--max-tokens", "7"]) == 0
    (llm,) = fake_llm
    assert llm.closed and llm.streamed[0][1].max_tokens == 7
    assert "Hello\n" in capsys.readouterr().out


def test_a_server_speaks():
    with FakeServer().running() as server:
        speaker = ServerSpeaker(server.url, None, {"max_tokens": 3, "seed": 1})
        assert speaker.name == "fake"
        assert "".join(speaker.answer([{"role": "user", "content": "Hi"}])) == " w w w"
        server.fail_every = 1
        with pytest.raises(RaylmError, match="the engine died"):
            list(speaker.answer([]))
        server.status = 400
        with pytest.raises(RaylmError, match="answered 400: no"):
            list(speaker.answer([]))
        speaker.close()
        path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["seed"] == 1 and body["stream"] is True and body["model"] == "fake"


def test_a_server_without_models():
    with FakeServer(models=[]).running() as server, pytest.raises(RaylmError, match="lists no models"):
        ServerSpeaker(server.url, None, {})


def test_serve_hands_over(monkeypatch):
    calls = []

    def serve(target, *, folder, front, host, port, given, engine):
        assert folder.is_dir()
        calls.append((target, front, host, port, given, engine, folder))

    monkeypatch.setattr("raylm.serving.program.keeper.fork_keeper", lambda: None)
    monkeypatch.setattr("raylm.serving.program.run.serve_command", serve)
    assert main(["serve", "app.yaml", "--port", "8001", "--front", "front.yaml"]) == 0
    options = ["--api-keys-file", "keys", "--tenants-file", "t.yaml", "--root-path", "/llm", "--tls-certificate", "c"]
    assert (
        main(["serve", "m", *options, "--tls-key", "k", "--unix-socket", "s", "-tp", "2", "--max-num-seqs", "8"]) == 0
    )
    here = Path.cwd()
    first = ("app.yaml", FrontGiven("front.yaml"), None, 8001, HttpGiven(), {})
    front = FrontGiven(None, str(here / "c"), str(here / "k"), str(here / "s"))
    second = ("m", front, None, None, HttpGiven(str(here / "keys"), str(here / "t.yaml"), "/llm"))
    second += ({"parallel": {"tensor": 2}, "scheduler": {"max_num_seqs": 8}},)
    assert [call[:-1] for call in calls] == [first, second]
    assert not any(call[-1].exists() for call in calls)


def test_doctor_reports_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "versions", "optional", "machine", "extension", "haproxy", "choices", "config", "problem"
    }  # fmt: skip
    assert found["versions"]["raylm"] == raylm.__version__ and found["versions"]["torch"]
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_gib"] > 0
    assert set(found["extension"]) == {"loaded", "path", "ops", "build_command", "status"}
    assert isinstance(found["haproxy"]["available"], bool)
    assert {choice["name"] for choice in found["choices"]} >= {"device", "attention"}
    assert all(choice["reason"] for choice in found["choices"])
    assert found["config"] is None and found["problem"] is None


@pytest.mark.usefixtures("demo")
def test_doctor_says_what_attention_runs_on(tmp_path, capsys, monkeypatch):
    path = tmp_path / "engine.yaml"

    def found(attention):
        runtime = {"attention": attention, "device": "cpu"}
        path.write_text(json.dumps({"model": {"path": "smollm2-135m"}, "runtime": runtime}))
        code = main(["doctor", str(path), "--json"])
        report = json.loads(capsys.readouterr().out)
        assert code == (0 if report["problem"] is None else 1)
        choices = {choice["name"]: (choice["value"], choice["reason"]) for choice in report["choices"]}
        return choices.get("attention"), report["problem"]

    assert found("torch") == (("torch", "runtime.attention is torch"), None)
    problem = "runtime.attention 'flash_attn' was asked for, but it runs on CUDA only and the device is cpu"
    assert found("flash_attn") == (None, problem)
    monkeypatch.setattr(extension, "load", lambda: extension.ExtensionStatus(None))
    (value, reason), _ = found("auto")
    assert value == "torch"
    assert reason == (
        "not raylm: the compiled extension is not installed; to build it, in raylm's repository: `make ext`; "
        "not flash_attn: it runs on CUDA only and the device is cpu"
    )


def test_doctor_finds_a_wrong_configuration(tmp_path, capsys):
    path = tmp_path / "engine.yaml"
    path.write_text("model: {path: x, dtyp: float32}\n")
    assert main(["doctor", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "problem" and "did you mean 'dtype'" in lines[1] and "versions" not in lines
    assert main(["doctor", "./nothing/here", "--json"]) == 1
    assert "does not exist" in json.loads(capsys.readouterr().out)["problem"]


def applications(*engines):
    """Of a Serve config file: the HTTP face, and one for each engine."""
    face = {"name": "llm", "import_path": "raylm.serving.app:build_ingress"}
    model = {"route_prefix": None, "import_path": "raylm.serving.app:build_model"}
    return [face, *({"name": f"m{i}", **model, "args": {"engine": one}} for i, one in enumerate(engines))]


def test_doctor_checks_a_serve_config(tmp_path, capsys):
    path = tmp_path / "llm.yaml"
    engine = {"model": {"path": "./nothing/here"}}
    path.write_text(json.dumps({"applications": applications(engine)}))
    assert main(["doctor", str(path), "--json"]) == 1
    assert "./nothing/here" in json.loads(capsys.readouterr().out)["problem"]


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("model: {path: PATH}", "temperature 0.6, top_k 20", "generation_config.json"),
        (
            "model: {path: PATH, sampling: {temperature: 1.0, top_p: 0.5}}",
            "top_p 0.5, top_k 20",
            "temperature, top_p: model.sampling; what that leaves open: generation_config.json",
        ),
        (
            "model: {path: PATH}\ngeneration: {defaults: neutral}",
            "neutral: temperature 1, all else off",
            "generation.defaults is neutral",
        ),
    ],
)
def test_doctor_says_how_requests_are_sampled_and_why(text, value, reason, tmp_path, capsys):
    checkpoints.llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    path = tmp_path / "engine.yaml"
    path.write_text(text.replace("PATH", str(tmp_path)))
    assert main(["doctor", str(path), "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert {"name": "sampling", "value": value, "reason": reason} in choices


@pytest.mark.usefixtures("demo")
def test_doctor_prints_the_configuration_as_it_would_be(tmp_path, capsys):
    path = tmp_path / "engine.yaml"
    path.write_text("model: {path: smollm2-135m}\nruntime: {device: cpu}\n")
    assert main(["doctor", str(path), "--max-num-seqs", "7", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["model"]["name"] == "smollm2-135m"
    assert (config["scheduler"]["max_num_seqs"], config["scheduler"]["max_num_batched_tokens"]) == (7, 2048)
    (tmp_path / "llm.yaml").write_text(json.dumps({"applications": applications("engine.yaml")}))
    assert main(["doctor", str(tmp_path / "llm.yaml")]) == 0
    out = capsys.readouterr().out
    shown = yaml.safe_load(out.partition("\nconfiguration\n")[2])
    face, model = (application["args"] for application in shown["applications"])
    assert model["engine"] == {**config, "scheduler": {**config["scheduler"], "max_num_seqs": 64}}
    assert (face["drain_timeout_s"], model["drain_timeout_s"]) == (60, 60)
    assert "null" not in out.replace("route_prefix: null", "")


@pytest.mark.parametrize("option", [["--gpu", "H200"], ["--gpus", "2"], ["--context", "9"]])
def test_doctor_takes_the_options_of_a_plan_for_a_plan_only(option, capsys):
    assert main(["doctor", "smollm2-135m", *option]) == 2
    assert capsys.readouterr().err == f"raylm: {option[0]} is for a plan; add --plan\n"


def test_a_serve_file_of_one_model_stands_for_its_engine(tmp_path):
    (tmp_path / "engine.yaml").write_text("model: {path: some/model, name: mine}\n")
    path = tmp_path / "llm.yaml"

    def config(*engines):
        path.write_text(json.dumps({"applications": [*applications(*engines), {"import_path": "other:app"}]}))
        return engine_config(parsed("--max-num-seqs", "3", str(path)))

    assert config("engine.yaml").model.name == "mine"
    assert config({"model": {"path": "x"}}).scheduler.max_num_seqs == 3
    with pytest.raises(ConfigError, match="llm.yaml is a Serve config file with 2 models of raylm; name an engine's"):
        config("engine.yaml", {"model": {"path": "x"}})
