#!/usr/bin/env bash
# Installs torch beside a Python, with further requirements if there are any: infra/torch.sh PYTHON
# VERSION [REQUIREMENT ...]. It comes as the CPU build where no NVIDIA driver answers: on Linux x86-64
# the one on PyPI is CUDA's, and takes gigabytes. TORCH_INDEX=URL names another index, TORCH_INDEX=pip
# leaves the choice to pip; so does an index or a folder of packages that pip is configured with.
set -euo pipefail
python="$1"
requirements=("torch==$2" "${@:3}")
index="${TORCH_INDEX:-}"
if [ -z "$index" ]; then
  if [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1 \
    || { "$python" -m pip config list; env; } | grep -iE '^(PIP_|:env:\.|[a-z]+\.)(extra.)?(index.url|find.links)=' >/dev/null; then
    index=pip
  else
    index=https://download.pytorch.org/whl/cpu
  fi
fi
if [ "$index" = pip ]; then
  echo "torch $2 from the index that pip has (TORCH_INDEX=URL names another)"
  exec "$python" -m pip install -qq "${requirements[@]}"
fi
echo "torch $2 from $index (TORCH_INDEX=pip: from the index that pip has)"
exec "$python" -m pip install -qq --extra-index-url "$index" "${requirements[@]}"
