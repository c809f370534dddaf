"""Settings of the server that change what clients see: origins, a path in front, templates, log-probabilities."""

import pytest

from checkpoints import CheckpointError
from checkpoints.tokenizer import load_tokenizer
from serving.api.http.connection.keys import is_one_of
from serving.api.http.settings import ServerSettings, resolve_settings
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import build_engine
from serving.split.settings import RouterSettings
from tests.support.fleets.processes import ENGINE
from tests.support.servers.live_server import LiveServer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if mood is defined %} ({{ mood }}){% endif %}"
SMALL = ENGINE | {"max_model_len": 128, "warmup": False}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A server with a template of its own, and pages of one origin that may use it; nothing has been compiled."""
    file = tmp_path_factory.mktemp("templates") / "plain.jinja"
    file.write_text(TEMPLATE)
    engine = build_engine(EngineConfig.create(chat_template=str(file), max_logprobs=30, **SMALL), progress=False).engine
    server = LiveServer(
        engine, prepare=False, allowed_origins="https://chat.example", root_path="/models/demo",
        default_chat_template_kwargs={"mood": "calm"}, api_key="secret",
    )  # fmt: skip
    server.http.headers["authorization"] = "Bearer secret"
    server.wait_until_ready()
    yield server
    server.close()


def text_of(server, **fields):
    body = {"messages": [{"role": "user", "content": "Hello"}]} | fields
    tokens = server.http.post("/tokenize", json=body).json()["tokens"]
    return server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_a_template_of_the_operators_and_its_variables(other):
    assert text_of(other) == "Hello (calm)"
    assert text_of(other, chat_template_kwargs={"mood": "wild"}) == "Hello (wild)"


def test_templates_and_tokenizers_are_found_or_refused(tmp_path):
    assert load_tokenizer("demo", chat_template="{{ 1 + 1 }}").apply_chat_template([]) == "2"
    with pytest.raises(CheckpointError, match=r"chat template .*none\.jinja: cannot be read"):
        load_tokenizer("demo", chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(CheckpointError, match="no such model"):
        build_engine(EngineConfig.create(tokenizer=str(tmp_path / "none"), **SMALL), progress=False)


def test_pages_of_an_origin(other):
    origin = {"origin": "https://chat.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    answer = other.http.options("/v1/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    refused = other.http.get("/v1/models", headers=origin | {"authorization": "Bearer wrong"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    other_origin = other.http.get("/v1/models", headers={"origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in other_origin.headers


def test_a_path_in_front(other):
    assert other.http.get("/openapi.json").json()["servers"] == [{"url": "/models/demo"}]
    assert other.http.get("/health", headers={"authorization": ""}).status_code == 200  # still needs no key


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 31}, "logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 31},
         "top_logprobs"),
    ],
)  # fmt: skip
def test_too_many_log_probabilities(other, path, fields, param):
    answer = other.http.post(path, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "at most 30" in answer.json()["error"]["message"]


@pytest.mark.full
def test_more_log_probabilities_than_by_default(other):
    body = {"prompt": "What is", "max_tokens": 2, "echo": True, "logprobs": 25, "temperature": 0}
    (choice,) = other.http.post("/v1/completions", json=body).json()["choices"]
    first, *tables = choice["logprobs"]["top_logprobs"]
    assert first is None
    for table in tables:
        assert 20 < len(table) <= 26  # tokens with the same text count once


def test_sampling_of_the_operators():
    settings, _ = resolve_settings({}, {"override_generation_config": {"temperature": 0.5, "top_k": 3}})
    assert settings.default_sampling["temperature"] == 0.5
    assert settings.default_sampling["top_k"] == 3
    assert resolve_settings({}, {"override_generation_config": ""})[0].override_generation_config == {}
    with pytest.raises(ConfigError, match="--override-generation-config: temperature"):
        resolve_settings({}, {"override_generation_config": {"temperature": -1}})
    assert ServerSettings.create().allowed_origins == ()


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_an_empty_key_is_no_key(name, monkeypatch):
    monkeypatch.setenv(f"MAMBA_JAX_{name.upper()}", "")
    assert getattr(resolve_settings({}, {})[0], name) == ()
    for bad in ("", "two words", "caf\xe9", ("good", "")):
        with pytest.raises(ConfigError, match=f"{name}: .*a key must be printable"):
            ServerSettings.create(**{name: bad})
    with pytest.raises(ConfigError, match=f"{name}: .*a key must be printable"):
        RouterSettings.create(**{name: ("",)})
    assert not is_one_of("", ("", "other"))
    assert is_one_of("other", ("", "other"))


def test_an_empty_beginning_of_omitted_lines_is_refused():
    with pytest.raises(ConfigError, match="omit_system_lines has an empty text"):
        ServerSettings.create(omit_system_lines=("x-session:", ""))
