"""Python libraries against the proxy of `real_clients.py`: `libraries.py NAME URL PROMPT ...`, with a tool.

Each library is used as its guide shows, with the usual variables or arguments of the openai SDK, on each API that it
knows. A prompt `@FILE` is a picture with a question. If a conversation is too long, the library must raise an error
that says so; the conversation then goes on with the prompt alone.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

TASK = "Use the tool."
QUESTION = "What is in the picture?"
TOO_LONG = ("context length", "prompt is too long")

Conversation = tuple[Callable[[str, str], object], Callable[[], object]]
"""Sends a prompt with a picture's file, or with none (""); and forgets the turns so far."""


def run_command(command: str) -> str:
    """Runs a command.

    Args:
        command: the command.
    """
    return "said-by-the-tool"


def address(file: str) -> str:
    """Returns a picture as a URL."""
    return f"data:image/png;base64,{base64.b64encode(Path(file).read_bytes()).decode()}"


def image_url(file: str) -> dict[str, Any]:
    """Returns the part of a chat message that has a picture."""
    return {"type": "image_url", "image_url": {"url": address(file)}}


def openai_agents(url: str) -> Iterator[Conversation]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    tool = agents.function_tool(run_command)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = kind("demo", openai.AsyncOpenAI(base_url=url, api_key="-"))
        agent, turns = agents.Agent(name="a", instructions=TASK, model=model, tools=[tool]), list[Any]()

        def ask(text: str, file: str, agent: Any = agent, turns: list[Any] = turns) -> None:
            parts = [{"type": "input_image", "image_url": address(file), "detail": "auto"}] if file else []
            content = [{"type": "input_text", "text": text}, *parts]
            done = agents.Runner.run_sync(agent, [*turns, {"role": "user", "content": content}])
            turns[:] = done.to_input_list()

        yield ask, turns.clear


def llm(url: str) -> Iterator[Conversation]:
    from llm import Attachment
    from llm.default_plugins.openai_models import Chat

    model = Chat("demo", model_name="demo", api_base=url, can_stream=True, supports_tools=True, vision=True)
    model.key = "-"
    conversation = model.conversation(tools=[run_command])

    def ask(text: str, file: str) -> None:
        attachments = [Attachment(path=file)] if file else []
        conversation.chain(text, system=TASK, attachments=attachments).text()

    yield ask, conversation.responses.clear


def instructor(url: str) -> Iterator[Conversation]:
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Person(BaseModel, extra="forbid"):
        name: Literal["Tom", "Ann"]
        age: int = Field(ge=0, le=99)

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="-"), mode=mode)
        turns: list[Any] = []

        def ask(text: str, file: str, client: Any = client, turns: list[Any] = turns) -> None:
            said = text if turns else f"said-by-the-tool {text}"  # it has no tools' results
            content = [{"type": "text", "text": said}, image_url(file)] if file else said
            asked = {"role": "user", "content": content}
            person = client.chat.completions.create(
                model="demo", messages=[*turns, asked], response_model=Person, max_tokens=400
            )
            turns.extend((asked, {"role": "assistant", "content": str(person)}))

        yield ask, turns.clear


def smolagents(url: str) -> Iterator[Conversation]:
    import smolagents
    from PIL import Image

    model = smolagents.OpenAIModel("demo", api_base=url, api_key="-")
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(run_command)], model=model, max_steps=2)

    def ask(text: str, file: str) -> None:
        agent.run(text, reset=False, images=[Image.open(file)] if file else None)

    yield ask, agent.memory.reset


def langgraph(url: str) -> Iterator[Conversation]:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    for responses in (False, True):
        model = ChatOpenAI(model="demo", base_url=url, api_key="-", use_responses_api=responses)
        agent, turns = create_react_agent(model, [run_command], prompt=TASK), list[Any]()

        def ask(text: str, file: str, agent: Any = agent, turns: list[Any] = turns) -> None:
            content = [{"type": "text", "text": text}, *([image_url(file)] if file else [])]
            turns[:] = agent.invoke({"messages": [*turns, ("user", content)]})["messages"]

        yield ask, turns.clear


def pydantic_ai(url: str) -> Iterator[Conversation]:
    from pydantic_ai import Agent, BinaryContent
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
        agent, turns = Agent(model, instructions=TASK, tools=[run_command]), list[Any]()

        def ask(text: str, file: str, agent: Any = agent, turns: list[Any] = turns) -> None:
            parts = [BinaryContent(Path(file).read_bytes(), media_type="image/png")] if file else []
            turns[:] = agent.run_sync([text, *parts], message_history=turns).all_messages()

        yield ask, turns.clear


def inspect_ai(url: str) -> Iterator[Conversation]:
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

    for name, base, options in (
        ("openai-api/local/demo", url, {}), ("openai/demo", url, {"responses_api": True}),
        ("anthropic/demo", url.removesuffix("/v1"), {}),
    ):  # fmt: skip
        model, turns = get_model(name, base_url=base, api_key="-", **options), list[Any]()

        def ask(text: str, file: str, model: Any = model, turns: list[Any] = turns) -> None:
            content = [ContentText(text=text), *([ContentImage(image=file)] if file else [])]
            data = [Sample(input=[*turns, ChatMessageUser(content=content)])]
            task = Task(dataset=data, solver=[solver.use_tools([commands()]), solver.generate()])
            (log,) = eval(task, model=model, display="none", log_dir="logs")
            assert log.status == "success", log.error
            if log.samples[0].output.stop_reason == "model_length":  # what it makes of the server's error
                raise ValueError("the context length")
            turns[:] = log.samples[0].messages

        yield ask, turns.clear


def lm_eval(url: str) -> Iterator[Conversation]:
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
    yield from ()


LIBRARIES = {
    "openai-agents": openai_agents, "llm": llm, "instructor": instructor, "smolagents": smolagents,
    "LangGraph": langgraph, "pydantic-ai": pydantic_ai, "inspect-ai": inspect_ai, "lm-eval": lm_eval,
}  # fmt: skip


def main(name: str, url: str, *prompts: str) -> None:
    """Runs the conversations of a library."""
    for ask, forget in LIBRARIES[name](f"{url}/v1"):
        for prompt in prompts:
            text, file = (QUESTION, prompt[1:]) if prompt.startswith("@") else (prompt, "")
            try:
                ask(text, file)
            except Exception as error:
                if not any(words in str(error) for words in TOO_LONG):
                    raise
                print(type(error).__name__, error)
                forget()
                ask(text, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
