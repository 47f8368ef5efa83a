"""Runs commands in the environment of `make test-clients`, which has OpenAI's and other clients."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".venv-clients"
PYTHON = FOLDER / "bin" / "python"
NODE = FOLDER / "bin" / "node"
RUN_S = 900.0  # the longest that a busy machine may take for one of them
# nothing is fetched from anywhere
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


async def run(
    command: Sequence[str | Path], more: Mapping[str, str] | None = None, folder: Path = ROOT
) -> str:
    """The output of a command. Raises AssertionError with the output if the command fails."""
    path = (
        f"{FOLDER / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=folder,
        env={**os.environ, "PATH": path, **OFFLINE, **(more or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_S):
            said, _ = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    text = said.decode(errors="replace")
    assert process.returncode == 0, text[-20_000:]
    return text
