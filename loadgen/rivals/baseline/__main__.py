"""`python -m loadgen.rivals.baseline`: the server."""

import argparse
import asyncio
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer

from loadgen.rivals.baseline.front import create_front
from loadgen.rivals.baseline.local import LocalGenerator
from loadgen.rivals.baseline.model import CausalModel

GRACE_S = 1
"""For those who still read an answer when the server is told to stop."""


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.rivals.baseline", description=__doc__)
    parser.add_argument("--model", required=True, help="a Transformers folder")
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="cores for all there is")
    asyncio.run(_serve(parser.parse_args()))


async def _serve(options: argparse.Namespace) -> None:
    app = _create_app(options)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=options.port, log_level="warning", timeout_graceful_shutdown=GRACE_S
    )
    await uvicorn.Server(config).serve()


def _create_app(options: argparse.Namespace) -> FastAPI:
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    model = CausalModel(options.model, options.dtype, options.threads)
    return create_front(LocalGenerator(model), tokenizer, options.served_name, model.context)


if __name__ == "__main__":
    main()
