"""Tests of infra/torch.sh, by which `make setup` and the image install torch: the CPU build where
no GPU is, unless the machine's owner says where packages come from.
"""

import os
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "torch.sh"
CPU = "https://download.pytorch.org/whl/cpu"
# a Python that says how pip is configured, and prints what it is asked to install
PYTHON = """#!/bin/sh
if [ "$3" = config ]; then cat "$(dirname "$0")/pip.conf"; else echo "$@"; fi
"""


def installs(folder: Path, *, pip: str = "", gpu: bool = False, **environment: str) -> str:
    """The request that pip hears, on a machine with pip configured so and with or without GPU."""
    (folder / "pip.conf").write_text(pip)
    driver = "#!/bin/sh\nexit 0\n" if gpu else "#!/bin/sh\nexit 9\n"
    for name, text in (("python", PYTHON), ("nvidia-smi", driver)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    done = subprocess.run(
        [SCRIPT, folder / "python", "2.13.0", "setuptools>=77"],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    said, asked = done.stdout.splitlines()
    assert said.startswith("torch 2.13.0 from ")
    assert asked.startswith("-m pip install -qq ")
    assert asked.endswith(" torch==2.13.0 setuptools>=77")
    return asked


def test_a_laptop_gets_the_cpu_build(tmp_path: Path) -> None:
    assert f"--extra-index-url {CPU} " in installs(tmp_path)


@pytest.mark.parametrize(
    "configured",
    [
        {"gpu": True},
        {"TORCH_INDEX": "pip"},
        {"PIP_INDEX_URL": "https://packages.example/simple"},
        {"PIP_FIND_LINKS": "/srv/wheels"},
        {"pip": "global.extra-index-url='https://packages.example/simple'\n"},
        {"pip": ":env:.find-links='/srv/wheels'\n"},
    ],
    ids=str,
)
def test_pip_chooses_where_a_gpu_is_or_pip_was_told_where_to_look(
    tmp_path: Path, configured: dict[str, str]
) -> None:
    assert "index-url" not in installs(tmp_path, **configured)  # type: ignore[arg-type]


def test_a_named_index_wins(tmp_path: Path) -> None:
    asked = installs(tmp_path, gpu=True, TORCH_INDEX="https://packages.example/cu130")
    assert "--extra-index-url https://packages.example/cu130 " in asked
