"""What a user of the client's wheel sees, in an environment that has neither the server nor PyTorch."""

import re

import pytest

from tests.release.environment import WheelEnvironment

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]
TURN = """
import sys
from djinn import Djinn

with Djinn(sys.argv[1]) as djinn, djinn.sessions.create() as session:
    print(len(session.generate(token_ids=[5, 6, 7], max_tokens=8, ignore_eos=True).token_ids))
"""
EVERY_MODULE = """
import importlib, pkgutil
import client

for module in pkgutil.walk_packages(client.__path__, "client."):
    if not module.name.startswith(("client.shell.", "client.transformer_lens", "client.inspect_ai")):  # they need more
        importlib.import_module(module.name)
"""
SIZE = """
from importlib.metadata import distributions

ours = [each for each in distributions() if each.name not in ("pip", "setuptools")]
print(sum(file.locate().stat().st_size for each in ours for file in each.files or () if file.locate().is_file()))
"""
MOST_BYTES = 15_000_000


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> WheelEnvironment:
    environment = WheelEnvironment(tmp_path_factory.mktemp("client"))
    environment.install_client()
    return environment


def test_the_client_and_each_of_its_modules_work_without_pytorch(light: WheelEnvironment, server_url: str) -> None:
    done = light.run("python", "-P", "-c", TURN, server_url)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
    installed = light.run("python", "-m", "pip", "list", "--format", "freeze").stdout
    assert "djinn-client==" in installed
    assert not {"djinn-server", "torch", "fastapi", "numpy"} & set(re.findall(r"^[\w-]+", installed, re.MULTILINE))
    done = light.run("python", "-P", "-c", EVERY_MODULE)
    assert done.returncode == 0, done.stderr
    assert int(light.run("python", "-P", "-c", SIZE).stdout) < MOST_BYTES
