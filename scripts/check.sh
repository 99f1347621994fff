#!/usr/bin/env bash
# The gate: format, lint, types, tests. Every commit passes it.
#   scripts/check.sh [PYTEST ARGUMENTS]
#   scripts/check.sh --changed [PYTEST ARGUMENTS]    only the tests of what differs from main: the test files that have
#                                                    changed or name a changed module, and those of the architecture
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1-}" = --changed ]; then
  shift
  base=$(git merge-base HEAD "$(git rev-parse --verify --quiet origin/main || git rev-parse main)")
  tests=tests/scripts/test_architecture.py
  for file in $(git diff --name-only --diff-filter=d "$base" -- '*.py') $(git ls-files --others --exclude-standard -- '*.py'); do
    case $file in
      */test_*.py) tests+=" $file" ;;
      transformer/*) module=$(echo "${file%.py}" | tr / .) && tests+=" $(git grep -lw -e "$module" -- 'tests/**/test_*.py' || true)" ;;
      tests/support/*) module=support.$(basename "$file" .py) && tests+=" $(git grep -lw -e "$module" -- 'tests/**/test_*.py' || true)" ;;
    esac
  done
  # shellcheck disable=SC2086 # a list of files
  set -- $(printf '%s\n' $tests | sort -u) "$@"
fi

ruff format --check .
ruff check .
mypy
pytest -q "$@"
