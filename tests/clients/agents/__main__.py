"""`python -m tests.clients.agents [NAME ...]`: installs agents, then runs them where no network is but loopback."""

import os
import sys

from tests.clients.agents.agents import AGENTS

names = [word for word in sys.argv[1:] if word in AGENTS] or list(AGENTS)
flags = [word for word in sys.argv[1:] if word not in AGENTS]
for name in names:
    AGENTS[name].programs()
cases = [f"tests/clients/agents/test_agents.py::test_an_agent_mends_a_bug[{name}]" for name in names]
os.execvp(
    "unshare", ["unshare", "--map-root-user", "--net", sys.executable, "-m", "pytest", "-m", "agents", *flags, *cases]
)
