#!/usr/bin/env bash
# The gate: format, lint, types, tests. Every commit passes it. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff format --check .
ruff check .
mypy
pytest -q "$@"
