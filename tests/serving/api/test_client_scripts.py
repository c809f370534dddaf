"""Client scripts of benchmarks/clients that need nothing but the test extra, and an agent framework if it is there."""

import asyncio

import pytest

from benchmarks.clients import agent_loop, openai_sdk


def test_the_openai_sdk(server, capsys):
    assert openai_sdk.main(["--url", server.url]) == 0
    said = capsys.readouterr().out
    assert "came from the cache" in said
    assert "a conversation that the server kept" in said
    assert "refused" in said


def test_the_anthropic_sdk(server, capsys):
    pytest.importorskip("anthropic", reason="needs the anthropic SDK (the extra `test`)")
    from benchmarks.clients import anthropic_sdk

    assert anthropic_sdk.main(["--url", server.url]) == 0
    said = capsys.readouterr().out
    assert "came from the cache" in said
    assert "called      look({'deep':" in said
    assert "refused" in said


def test_an_agents_loop(server, capsys):
    messages = agent_loop.loop(server.openai(), "demo", "Tom has 5 apples and gets 7 more.")
    assert [message["role"] for message in messages] == ["user", *["assistant", "tool"] * 3, "assistant"]
    assert capsys.readouterr().out.count("add({") == 3


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_framework_completes_a_loop(server, api):
    """The OpenAI Agents SDK, unmodified: the first turn must call a tool, whose result it hands back for an answer."""
    agents = pytest.importorskip("agents", reason="needs openai-agents (pip install openai-agents)")
    import openai

    agents.set_tracing_disabled(True)
    called = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        called.append((a, b))
        return str(a + b)

    async def run():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-")
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        settings = agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=120, temperature=0.0
        )
        agent = agents.Agent(
            name="adder", instructions="Add.", model=kind("demo", client), tools=[add], model_settings=settings
        )
        return await agents.Runner.run(agent, "Tom has 5 apples and gets 7 more.", max_turns=4)

    result = asyncio.run(run())  # tool_choice goes back to auto after a call, so the second turn answers
    assert len(called) == 1
    assert isinstance(result.final_output, str)
