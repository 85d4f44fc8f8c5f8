"""What is published about how a process under test was started."""

from pathlib import Path

from benchmarks.launch import Launch, without_folders


def test_a_published_launch_tells_nothing_about_the_machine() -> None:
    launch = Launch(
        ["/home/me/djinn/.venv/bin/python", "-m", "app", "serve", "--model", "/models/smollm2", "--port", "0"],
        {"LD_PRELOAD": "/home/me/djinn/.venv-vllm/lib/libiomp5.so", "HF_HUB_OFFLINE": "1"},
    )

    published = without_folders(launch, [Path("/home/me/djinn"), Path("/models")])

    assert published.command == [".venv/bin/python", "-m", "app", "serve", "--model", "smollm2", "--port", "0"]
    assert published.environment == {"LD_PRELOAD": ".venv-vllm/lib/libiomp5.so", "HF_HUB_OFFLINE": "1"}
