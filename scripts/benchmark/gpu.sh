#!/usr/bin/env bash
# What only a GPU can show, in under nine minutes: the tests marked gpu, the speed of a step, a training to its BLEU.
#
#   scripts/benchmark/gather.sh                 once, where there is a network: wheels and corpora, into .gpu/
#   scripts/benchmark/gpu.sh                    where there is a GPU with torch 2.11 and Python 3.12: every stage
#   scripts/benchmark/gpu.sh steps multi30k     some stages of: tests, steps, multi30k
#   scripts/benchmark/gpu.sh kftt               Japanese to English, base size: this alone takes all of the time
#   scripts/benchmark/gpu.sh --dry-run          the same on a CPU and tiny, to try it
#
# Each stage leaves NAME.json and NAME.txt in $OUT (default: out/), and summary.json says which passed; so does the exit
# status. What gather.sh found is installed beside the machine's own packages, never over them: torch stays as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."
begun=$(date +%s)
folder=${GPU_FOLDER:-.gpu}
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1

dry=no
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then dry=yes; fi
done
if [ "$dry" = yes ]; then
  export OMP_WAIT_POLICY=passive # the cores may have other work
else
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$folder"/wheels/*.whl
  PYTHONPATH="$PWD:$site"
fi
python3 scripts/benchmark/gpu.py --begun "$begun" --data "$folder/data" --out "${OUT:-out}" "$@"
