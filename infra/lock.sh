#!/usr/bin/env bash
# Writes requirements.lock anew: every dependency of pyproject.toml with its hashes, keeping the pins
# that still fit. Pass --upgrade to move to the newest versions. Run it with Python 3.11.
# vLLM has an environment of its own: infra/vllm/ lists the versions it was tested with.
# torch itself stays out, since the right build depends on the machine: `make setup` installs it
# separately. The dependencies of torch are pinned here.
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
required = [*project["dependencies"]]
for name, extra in project["optional-dependencies"].items():
    if name != "vllm":
        required += extra
of_torch = ["filelock", "fsspec", "jinja2", "networkx", "setuptools>=77", "sympy"]
of_torch += ["typing-extensions"]
print("\n".join(sorted({r for r in required if not r.startswith("torch==")} | set(of_torch))))
PY

CUSTOM_COMPILE_COMMAND="infra/lock.sh" "$python" -m piptools compile "$inputs/requirements.in" \
    --output-file requirements.lock \
    --generate-hashes --allow-unsafe --strip-extras --no-annotate --quiet \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host "$@"
echo "requirements.lock: $(grep -c '==' requirements.lock) packages"
