#!/usr/bin/env bash
# Looks up known vulnerabilities of every package in requirements.lock, and of torch, at PyPI.
# Exit status: 0 none is known, 1 some are (they are listed), 3 nothing was audited, since this
# network has no such service.
set -euo pipefail
cd "$(dirname "$0")/.."

tools="$(mktemp -d)"
trap 'rm -rf "$tools"' EXIT
pinned="$tools/pinned.txt"
{
  grep -oE '^[A-Za-z0-9._-]+==[^ ]+' requirements.lock
  grep -oE 'torch==[0-9.]+' pyproject.toml
} >"$pinned"

# A mirror that only has packages answers 404 for all of them, and pip-audit would find no fault.
"${PYTHON:-.venv/bin/python}" - "$(head -n 1 "$pinned")" <<'PY' || exit 3
import json, sys, urllib.request
from pip._internal.models.index import PyPI

name, version = sys.argv[1].split("==")
try:
    with urllib.request.urlopen(f"{PyPI.pypi_url}/{name}/{version}/json", timeout=20) as page:
        json.load(page)["vulnerabilities"]
except (OSError, ValueError, KeyError) as error:
    sys.exit(f"NOT AUDITED: no service for vulnerabilities at {PyPI.netloc} from here ({error})")
PY

"${PYTHON:-.venv/bin/python}" -m venv "$tools/env"
"$tools/env/bin/python" -m pip install -qq 'pip-audit>=2.10,<3'
"$tools/env/bin/pip-audit" --strict --no-deps --disable-pip --progress-spinner off -r "$pinned"
