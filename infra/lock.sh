#!/usr/bin/env bash
# Makes requirements.lock again: every dependency of pyproject.toml with its hashes, keeping the pins that still fit. vLLM has an
# environment of its own: what it was tried with is in infra/vllm/.
# Pass --upgrade to move to the newest versions. torch itself stays out: which build is right depends on the machine,
# so `make setup` installs it by its own line; what torch depends on is pinned here. Run it with Python 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."

inputs="$(mktemp -d)"
trap 'rm -rf "$inputs"' EXIT
"${PYTHON:-.venv/bin/python}" -m venv "$inputs/tools"
python="$inputs/tools/bin/python"
"$python" -m pip install --quiet 'pip-tools>=7.5'

"$python" - >"$inputs/requirements.in" <<'PY'
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *(r for name, extra in project["optional-dependencies"].items() if name != "vllm" for r in extra)]
of_torch = ["filelock", "fsspec", "jinja2", "networkx", "setuptools>=77", "sympy", "typing-extensions"]
print("\n".join(sorted({r for r in wanted if not r.startswith("torch==")} | set(of_torch))))
PY

CUSTOM_COMPILE_COMMAND="infra/lock.sh" "$python" -m piptools compile "$inputs/requirements.in" --output-file requirements.lock \
    --generate-hashes --allow-unsafe --strip-extras --no-annotate --quiet \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host "$@"
echo "requirements.lock: $(grep -c '==' requirements.lock) packages"
