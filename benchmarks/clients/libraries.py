"""Python libraries against the proxy of `real_clients.py`: `libraries.py NAME URL` runs two turns, one with a tool.

Each library is used as its guide shows, with the openai SDK's usual variables or arguments.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Literal

FIRST, SECOND, TASK = "Say hello with a command.", "And what did it say?", "Use the tool."


def run_command(command: str) -> str:
    """Runs a command.

    Args:
        command: the command.
    """
    return "said-by-the-tool"


def openai_agents(url: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="-")
    tool = agents.function_tool(run_command)

    async def turns() -> None:
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            agent = agents.Agent(name="a", instructions=TASK, model=kind("demo", client), tools=[tool])
            first = await agents.Runner.run(agent, FIRST)
            await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": SECOND}])

    asyncio.run(turns())


def llm(url: str) -> None:
    from llm.default_plugins.openai_models import Chat

    model = Chat("demo", model_name="demo", api_base=url, can_stream=True, supports_tools=True)
    model.key = "-"
    conversation = model.conversation(tools=[run_command])
    conversation.chain(FIRST, system=TASK).text()
    conversation.chain(SECOND).text()


def instructor(url: str) -> None:
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: Literal["Tom", "Ann"]
        age: int = Field(ge=0, le=99)

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="-"), mode=mode)
        turns: list[Any] = [{"role": "user", "content": f"said-by-the-tool {FIRST}"}]
        person = client.chat.completions.create(model="demo", messages=turns, response_model=Person, max_tokens=400)
        turns += [{"role": "assistant", "content": str(person)}, {"role": "user", "content": SECOND}]
        client.chat.completions.create(model="demo", messages=turns, response_model=Person, max_tokens=400)


def smolagents(url: str) -> None:
    import smolagents

    model = smolagents.OpenAIModel("demo", api_base=url, api_key="-")
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(run_command)], model=model, max_steps=2)
    agent.run(FIRST)
    agent.run(SECOND, reset=False)


def langgraph(url: str) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    for responses in (False, True):
        model = ChatOpenAI(model="demo", base_url=url, api_key="-", use_responses_api=responses)
        agent = create_react_agent(model, [run_command], prompt=TASK)
        state = agent.invoke({"messages": [("user", FIRST)]})
        agent.invoke({"messages": [*state["messages"], ("user", SECOND)]})


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="-")
    anthropic = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="-")
    for model in (
        OpenAIChatModel("demo", provider=provider), OpenAIResponsesModel("demo", provider=provider),
        AnthropicModel("demo", provider=anthropic),
    ):  # fmt: skip
        agent = Agent(model, instructions=TASK, tools=[run_command])
        first = agent.run_sync(FIRST)
        agent.run_sync(SECOND, message_history=first.all_messages())


def inspect_ai(url: str) -> None:
    from inspect_ai import Task, eval, solver
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, get_model
    from inspect_ai.tool import Tool, tool

    @tool(name="run_command")
    def commands() -> Tool:
        async def execute(command: str) -> str:
            """Runs a command.

            Args:
                command: the command.
            """
            return run_command(command)

        return execute

    looks = ChatMessageUser(content=[ContentText(text=FIRST), ContentImage(image="dot.png")])
    for name, address, options in (
        ("openai-api/local/demo", url, {}), ("openai/demo", url, {"responses_api": True}),
        ("anthropic/demo", url.removesuffix("/v1"), {}),
    ):  # fmt: skip
        model = get_model(name, base_url=address, api_key="-", **options)
        steps = [solver.use_tools([commands()]), solver.generate(), solver.user_message(SECOND), solver.generate()]
        task = Task(dataset=[Sample(input=[looks])], solver=steps)
        (log,) = eval(task, model=model, display="none", log_dir="logs")
        assert log.status == "success", log.error


def lm_eval(url: str) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    here = Path(__file__).parent
    os.chdir(here.parents[1])  # the task names its file from there
    tasks = TaskManager(include_path=str(here / "lm_eval"))
    scores = f"base_url={url}/completions,tokenizer_backend=huggingface,tokenizer=checkpoints/demo"
    for kind, arguments, task, chat in (
        ("local-completions", scores, "mamba_jax_sentences", False),
        ("local-chat-completions", f"base_url={url}/chat/completions", "mamba_jax_words", True),
    ):
        lm_eval.simple_evaluate(
            model=kind, model_args=f"model=demo,{arguments}", tasks=[task], task_manager=tasks, limit=2,
            bootstrap_iters=0, apply_chat_template=chat,
        )  # fmt: skip


LIBRARIES = {
    "openai-agents": openai_agents, "llm": llm, "instructor": instructor, "smolagents": smolagents,
    "LangGraph": langgraph, "pydantic-ai": pydantic_ai, "inspect-ai": inspect_ai, "lm-eval": lm_eval,
}  # fmt: skip

if __name__ == "__main__":
    LIBRARIES[sys.argv[1]](f"{sys.argv[2]}/v1")
