"""Coding agents that are installed from npm and PyPI: how each is configured, and the script of its model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.agents.scripted import SUBTASK, call
from tests.clients.environments import node_environment, python_environment

CACHE = ".venv-agents"
COMMANDS = [
    "cat calc.py",
    "sed -i 's/a - b/a + b/' calc.py; cat calc.py",
    "git diff --no-index /dev/null calc.py",
    "ls -la",
    "wc calc.py",
    "md5sum calc.py",
    *(f"echo {word}" for word in ("seven", "eight", "nine")),
]
DONE = "The bug in calc.py is mended."


@dataclass(frozen=True)
class Agent:
    """How to install and run one. `files` are below its home; it works in a folder there.

    `command` ends with the task. $URL and $MODEL stand for the server's.
    """

    packages: Sequence[str]
    script: Sequence[str]
    command: Sequence[str]
    files: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    """The version of Python that it needs; empty: it comes from npm."""
    more: Sequence[Sequence[str]] = ()
    """Further commands, which go on with the conversation."""
    shortens: bool = False
    """Whether one of them puts a summary in the place of the history."""

    def programs(self) -> Path:
        """The folder of its programs. The first call installs it."""
        if self.python:
            return python_environment(CACHE, "python", self.packages, python=self.python).parent
        return node_environment(CACHE, "npm", self.packages) / "node_modules" / ".bin"


def shell_loop(tool: str, argument: str, *more: str, **others: Any) -> list[str]:
    """Look, mend, look again and again by a tool that runs commands; then `more`, and the last words."""
    return [*(call(tool, **{argument: each, **others}) for each in COMMANDS), *more, DONE]


CODEX = """
model = "$MODEL"
model_provider = "djinn"
[model_providers.djinn]
name = "Djinn"
base_url = "$URL/v1"
wire_api = "responses"
env_key = "DJINN_API_KEY"
"""
CODEX_EXEC = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
CODEX_SHORTENED = ["-c", "model_auto_compact_token_limit=9600"]
"""It shortens what has more tokens: the conversation, but not instructions and tools alone."""
CODEX_WEBSOCKET = ["-c", "model_providers.djinn.supports_websockets=true"]
CLAUDE = ["claude", "--allowedTools", "Bash Read Edit", "-p"]
OPENCODE = {
    "model": "djinn/$MODEL",
    "small_model": "djinn/$MODEL",
    "provider": {
        "djinn": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "$URL/v1", "apiKey": "none"},
            "models": {"$MODEL": {"limit": {"context": 32768, "output": 8000}}},
        }
    },
}
SMALLER = json.dumps({"provider": {"djinn": {"models": {"$MODEL": {"limit": {"context": 16000, "output": 8000}}}}}})
OPENCODE_SHORTENED = ["env", f"OPENCODE_CONFIG_CONTENT={SMALLER}", "opencode"]
"""It shortens what has more than 8,000 tokens: the conversation, but not instructions and tools alone."""
PI = {
    "providers": {
        "djinn": {"baseUrl": "$URL/v1", "api": "openai-completions", "apiKey": "none", "models": [{"id": "$MODEL"}]}
    }
}
CONTINUE = """
name: djinn
version: 0.0.1
schema: v1
models: [{name: $MODEL, provider: openai, model: $MODEL, apiBase: $URL/v1, apiKey: none}]
"""
OPENHANDS = """
import os, sys
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

llm = LLM(model="openai/$MODEL", base_url="$URL/v1", api_key="none")
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
"""
AGENTS = {
    "openhands": Agent(
        packages=["openhands-sdk==1.58.2", "openhands-tools==1.58.2"],
        script=[
            *(call("terminal", command=each, summary="Work on calc.py", security_risk="LOW") for each in COMMANDS),
            call("finish", message=DONE),
        ],
        command=["python", "../run.py"],
        files={"run.py": OPENHANDS},
        python="3.12",
    ),
    "qwen-code": Agent(
        packages=["@qwen-code/qwen-code@0.24.4"],
        script=shell_loop("run_shell_command", "command", is_background=False),
        command=["qwen", "-y", "-p"],
        environment={"OPENAI_BASE_URL": "$URL/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "$MODEL"},
    ),
    "continue": Agent(
        packages=["@continuedev/cli@1.5.47"],
        script=shell_loop("Bash", "command"),
        command=["cn", "--config", "../config.yaml", "--auto", "-p"],
        files={"config.yaml": CONTINUE},
    ),
    "cline": Agent(
        packages=["cline@3.0.65"],
        script=[*(call("run_commands", commands=[each]) for each in COMMANDS), DONE],
        command=["sh", "-c", 'cline auth openai -k none -m $MODEL -b $URL/v1 && exec cline "$$0"'],
    ),
    "pi": Agent(
        packages=["@mariozechner/pi-coding-agent@0.73.1"],
        script=shell_loop("bash", "command"),
        command=["pi", "--provider", "djinn", "--model", "$MODEL", "-p"],
        files={".pi/agent/models.json": PI},
    ),
    "mini-swe-agent": Agent(
        packages=["mini-swe-agent==2.4.6"],
        script=shell_loop("bash", "command", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
        command=["mini", "-m", "openai/$MODEL", "-y", "--exit-immediately", "-t"],
        environment={
            "OPENAI_API_BASE": "$URL/v1",
            "OPENAI_API_KEY": "none",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_CONFIGURED": "true",
        },
        python="3.11",
    ),
    "opencode": Agent(
        packages=["opencode-ai@1.18.33"],
        script=[
            call("task", description="Look at calc.py", prompt=SUBTASK, subagent_type="general"),
            *shell_loop("bash", "command", description="Work on calc.py"),
        ],
        command=["opencode", "run"],
        more=[["opencode", "run", "--continue", "And now?"], [*OPENCODE_SHORTENED, "run", "--continue", "And now?"]],
        shortens=True,
        files={".config/opencode/opencode.json": OPENCODE},
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "codex": Agent(
        packages=["@openai/codex@0.171.0"],
        script=shell_loop("exec_command", "cmd"),
        command=CODEX_EXEC,
        more=[
            [*CODEX_EXEC, *flags, "resume", "--last", "And now?"] for flags in ([], CODEX_SHORTENED, CODEX_WEBSOCKET)
        ],
        shortens=True,
        files={".codex/config.toml": CODEX},
        environment={"DJINN_API_KEY": "none"},
    ),
    "claude-code": Agent(
        packages=["@anthropic-ai/claude-code@2.1.332"],
        script=[
            call("Agent", description="Look at calc.py", prompt=SUBTASK, subagent_type="general-purpose"),
            call("ToolSearch", query="select:WebSearch,NotebookEdit", max_results=5),
            *shell_loop("Bash", "command"),
        ],
        command=CLAUDE,
        more=[[*CLAUDE, "--continue", "/compact"], [*CLAUDE, "--continue", "And now?"]],
        shortens=True,
        environment={
            "ANTHROPIC_BASE_URL": "$URL",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "$MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL": "$MODEL",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
}
