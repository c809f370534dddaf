"""The clients that `real_clients.py` runs: how each is told the address, and its commands for each turn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from benchmarks.clients.writing_proxy import RESULT

FIRST, SECOND, THIRD = "Say hello with a command.", "And what did it say?", "Is that all?"


@dataclass(frozen=True)
class Client:
    """One client: its commands, and what it needs in its home. `{url}` is the proxy's, `{home}` the home, `{python}`
    the Python that has `package`, `{self}` the script's, and `{here}` this folder."""

    name: str
    version: list[str]
    first: list[str]
    second: list[str] | None = None
    picture: list[str] | None = None
    """The commands of the turns; without `second`, the first command runs both."""
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    shortened: list[str] | None = None
    """The command of a turn before which the client shortens the conversation, because it has come near a limit."""
    overflow: list[str] | None = None
    """The command of a turn that becomes too long with its tool's result; None if a further turn becomes too long."""
    package: str = ""
    """Its name on PyPI; "" if it comes from npm."""
    tools: bool = True
    turns: bool = True
    """Whether it calls tools, and whether it has conversations of several turns."""


def opencode(name: str, provider: str) -> Client:
    """Returns OpenCode with one of its providers."""
    model = {"name": "demo", "attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
    settings = {
        "provider": {"local": {
            "npm": provider, "options": {"baseURL": "{url}/v1", "apiKey": "-"}, "models": {"demo": model}}},
        "permission": {"bash": "allow"}, "autoupdate": False,
    }  # fmt: skip
    words = ["opencode", "run", "-m", "local/demo"]
    return Client(
        name, ["opencode", "--version"], [*words, FIRST], [*words, "--continue", SECOND],
        [*words, "What is in the picture?", "-f", "{home}/dot.png"],
        {".config/opencode/opencode.json": json.dumps(settings)}, {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    )  # fmt: skip


def session(name: str, content: object) -> str:
    """Returns Continue's file of a conversation with one message."""
    history = [{"message": {"role": "user", "content": content}, "contextItems": []}]
    return json.dumps({"sessionId": name, "title": "-", "workspaceDirectory": "{home}", "history": history})


CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
RESUME = ["codex", "exec", "resume", "--last", "--skip-git-repo-check"]
CLAUDE = ["claude", "-p", "--model", "demo", "--allowedTools", "Bash,Read"]
CLINE = ["--", "cline", "--acp"]  # its commands without a screen have no second turn
CONTINUE = ["cn", "--config", "{home}/config.yaml", "--auto", "-p"]
VERSION = ["{python}", "-c", "import importlib.metadata as m; print(m.version('{package}'))"]
LIBRARY = ["{python}", "{here}/libraries.py"]
NPM = (
    Client(
        "Codex", ["codex", "--version"], [*CODEX, FIRST],
        [*RESUME, SECOND],
        [*CODEX, "-i", "{home}/dot.png", "--", "What is in the picture?"],
        {".codex/config.toml": 'model = "demo"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
         'base_url = "{url}/v1"\nwire_api = "responses"\n'},
        shortened=[*RESUME, "-c", "model_auto_compact_token_limit=300", "-c",
            "model_auto_compact_token_limit_scope=body_after_prefix", THIRD],
    ),
    Client(
        "Claude Code", ["claude", "--version"], [*CLAUDE, "--", FIRST], [*CLAUDE, "--continue", SECOND],
        [*CLAUDE, "--", "Look at @{home}/dot.png"],
        variables={"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "-", "ANTHROPIC_SMALL_FAST_MODEL": "demo",
                   "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    *(opencode(*provider) for provider in (
        ("OpenCode", "@ai-sdk/openai-compatible"), ("OpenCode (openai)", "@ai-sdk/openai"),
        ("OpenCode (anthropic)", "@ai-sdk/anthropic"))),
    Client(
        "Qwen Code", ["qwen", "--version"], ["qwen", "--yolo", "--auth-type", "openai", "-p", FIRST],
        ["qwen", "--yolo", "--auth-type", "openai", "--continue", "-p", SECOND],
        ["qwen", "--yolo", "--auth-type", "openai", "-p", "Look at @dot.png"],
        {".qwen/settings.json": json.dumps({"model": {"generationConfig": {"modalities": {"image": True}}}})},
        variables={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "-", "OPENAI_MODEL": "demo"},
    ),
    Client(
        "pi", ["pi", "--version"], ["pi", "--provider", "local", "--model", "demo", "-p", FIRST],
        ["pi", "--provider", "local", "--model", "demo", "--continue", "-p", SECOND],
        ["pi", "--provider", "local", "--model", "demo", "-p", "@{home}/dot.png", "What is in the picture?"],
        {".pi/agent/models.json": json.dumps({"providers": {"local": {
            "baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "-",
            "models": [{"id": "demo", "input": ["text", "image"]}]}}}),
         ".pi/agent/settings.json": json.dumps({"compaction": {"enabled": True, "keepRecentTokens": 10}})},
    ),
    Client(
        "Cline", ["cline", "--version"], ["{self}", "{here}/agent_protocol.py", FIRST, SECOND, *CLINE],
        picture=["cline", "What is in @{home}/dot.png"],
        overflow=["cline", FIRST],  # its protocol for editors does not shorten conversations
        files={".cline/data/settings/providers.json": json.dumps({
            "version": 1, "lastUsedProvider": "openai-compatible", "modes": {}, "providers": {"openai-compatible": {
                "settings": {"provider": "openai-compatible", "apiKey": "-", "model": "demo", "baseUrl": "{url}/v1"},
                "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}}})},
        variables={"CLINE_SESSION_BACKEND_MODE": "local", "CLINE_API_KEY": "-", "CLINE_PROVIDER": "openai-compatible",
            "CLINE_MODEL": "demo", "CLINE_NO_AUTO_UPDATE": "1", "CLINE_TELEMETRY_DISABLED": "1"},
    ),
    Client(
        "Continue", ["cn", "--version"], [*CONTINUE, FIRST], [*CONTINUE, "--resume", SECOND],
        [*CONTINUE, "--fork", "picture", "What is in it?"],  # without a screen, only earlier turns have pictures
        files={
            ".continue/sessions/picture.json": session("picture", [
                {"type": "text", "text": "Look."}, {"type": "imageUrl", "imageUrl": {"url": "{picture}"}}]),
            "config.yaml": json.dumps({"name": "local", "version": "1.0.0", "schema": "v1", "models": [{
                "name": "demo", "provider": "openai", "model": "demo", "apiBase": "{url}/v1", "apiKey": "-",
                "roles": ["chat"], "capabilities": ["tool_use", "image_input"],
                "defaultCompletionOptions": {"contextLength": 40_000, "maxTokens": 15_000}}]}),
            ".continue/sessions/long.json": session("long", f"{FIRST} {RESULT}{' again' * 12_000}"),
        },
        variables={"CONTINUE_CLI_ENABLE_TELEMETRY": "0", "CONTINUE_TELEMETRY_ENABLED": "0"},
        shortened=[*CONTINUE, "--fork", "long", THIRD],  # summarizes at contextLength - 2 * maxTokens
    ),
)  # fmt: skip
AIDER = [
    "{python}", "-m", "aider", "--model", "openai/demo", "--openai-api-base", "{url}/v1", "--openai-api-key", "-",
    "--yes-always", "--no-git", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings",
    "--analytics-disable", "--no-pretty", "--map-tokens", "0",
]  # fmt: skip
LIBRARIES = (
    ("openai-agents", "openai-agents"), ("llm", "llm"), ("instructor", "instructor"), ("smolagents", "smolagents"),
    ("LangGraph", "langgraph"), ("pydantic-ai", "pydantic-ai-slim"), ("inspect-ai", "inspect-ai"),
)  # fmt: skip
PYTHON = (
    *(Client(name, VERSION, [*LIBRARY, name, "{url}", FIRST, SECOND], package=package,
             picture=[*LIBRARY, name, "{url}", "@{home}/dot.png"]) for name, package in LIBRARIES),
    Client("lm-eval", VERSION, [*LIBRARY, "lm-eval", "{url}"], package="lm-eval", tools=False, turns=False),
    Client(
        "aider", VERSION, [*AIDER, "--message", FIRST], [*AIDER, "--restore-chat-history", "--message", SECOND],
        [*AIDER, "--message", "What is in the picture?", "{home}/dot.png"],
        {".aider.model.metadata.json": json.dumps({"openai/demo": {
            "litellm_provider": "openai", "mode": "chat", "max_input_tokens": 131072, "supports_vision": True,
            "input_cost_per_token": 0, "output_cost_per_token": 0}})},
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}, package="aider-chat", tools=False,
        shortened=[*AIDER, "--restore-chat-history", "--max-chat-history-tokens", "9", "--message", THIRD],
    ),
)  # fmt: skip
