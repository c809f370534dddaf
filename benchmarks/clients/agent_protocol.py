"""Runs the turns of one conversation with a client that speaks the Agent Client Protocol on its standard streams.

python agent_protocol.py PROMPT ... -- COMMAND ...: it may run commands.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO, Any


class Agent:
    """The client's process."""

    def __init__(self, command: list[str]) -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        self._sent: IO[str] = process.stdin
        self._received: IO[str] = process.stdout
        self.process = process

    def _send(self, **message: Any) -> None:
        self._sent.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._sent.flush()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method, answers the client's own requests meanwhile, and returns the result."""
        self._send(id=method, method=method, params=params)
        for line in self._received:
            print(line[:500], end="", flush=True)
            message = json.loads(line) if line.startswith("{") else {}
            if message.get("id") == method and "method" not in message:
                return dict(message.get("result") or {})
            if message.get("method") == "session/request_permission":
                options = message["params"]["options"]
                allowed = next((each for each in options if each["kind"].startswith("allow")), options[0])
                outcome = {"outcome": "selected", "optionId": allowed["optionId"]}
                self._send(id=message["id"], result={"outcome": outcome})
            elif "id" in message and "method" in message:
                self._send(id=message["id"], error={"code": -32601, "message": "not supported"})
        raise SystemExit(f"the client ended during {method}")


def main(arguments: list[str]) -> None:
    """Runs the turns."""
    middle = arguments.index("--")
    agent = Agent(arguments[middle + 1 :])
    files = {"readTextFile": False, "writeTextFile": False}
    agent.call("initialize", protocolVersion=1, clientCapabilities={"fs": files, "terminal": False})
    session = agent.call("session/new", cwd=str(Path.cwd()), mcpServers=[])["sessionId"]
    agent.call("session/set_model", sessionId=session, modelId="demo")
    for prompt in arguments[:middle]:
        agent.call("session/prompt", sessionId=session, prompt=[{"type": "text", "text": prompt}])
    agent.process.terminate()


if __name__ == "__main__":
    main(sys.argv[1:])
