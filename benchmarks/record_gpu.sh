#!/usr/bin/env bash
# Record this machine's GPU for the notebooks: data/recorded/<device>/*.json, under 8 minutes.
# Needs torch >= 2.9 and numpy, nothing else; PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-}"
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
# an empty cache, so that the cost of compiling is that of the first time
TORCHINDUCTOR_CACHE_DIR="$(mktemp -d)"
export TORCHINDUCTOR_CACHE_DIR
trap 'rm -rf "$TORCHINDUCTOR_CACHE_DIR"' EXIT
timeout 480 "$python" -m benchmarks.record "$@"
