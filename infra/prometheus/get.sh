#!/usr/bin/env bash
# Unpacks prometheus and promtool into var/prometheus, from Debian's package, for the tests: nothing
# is installed and no service is started. Does nothing where they are on the path already. Exit
# status 3: this system has no such package.
set -euo pipefail
cd "$(dirname "$0")/../.."

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
if [ -x var/prometheus/usr/bin/promtool ]; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
  echo "no prometheus here, and no apt-get to have it from: its tests are skipped" >&2
  exit 3
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
if ! (cd "$folder" && apt-get download prometheus >/dev/null 2>&1); then
  # as root the lists can be fetched; they may be missing on a bare machine
  apt-get update >/dev/null 2>&1 || true
  if ! (cd "$folder" && apt-get download prometheus >/dev/null 2>&1); then
    echo "Debian's package prometheus cannot be had: its tests are skipped" >&2
    exit 3
  fi
fi
mkdir -p var/prometheus
dpkg-deb -x "$folder"/prometheus_*.deb var/prometheus
