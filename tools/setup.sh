#!/bin/sh
# Find a Python that is new enough and let it run install.py.
for python in python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$python" >/dev/null 2>&1 &&
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        exec "$python" "$(dirname "$0")/install.py"
    fi
done
echo "The course needs Python 3.11 or newer and found none on PATH: install one" \
    "(Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python)" \
    "and run make again." >&2
exit 1
