#!/usr/bin/env bash
# What only a GPU can show, in stages of under nine minutes, each of which goes on where it was stopped.
#
#   scripts/benchmark/gather.sh [STAGE]         where there is a network: wheels and the corpus of the stage, into .gpu/
#   scripts/benchmark/gpu.sh check              where there is a GPU with torch 2.11 and Python 3.12: facts, tests, times
#   scripts/benchmark/gpu.sh compare            variants and peers in turns, big, Multi30k to its BLEU
#   scripts/benchmark/gpu.sh learn              KFTT, Japanese to English, base size, to its BLEU
#   scripts/benchmark/gpu.sh kernels            this package's Triton kernels: tests, times, and in the step
#   scripts/benchmark/gpu.sh minute             what is to be decided, one call; `minute --second`: peers, another call
#   scripts/benchmark/gpu.sh check decoding     only some parts of a stage
#   scripts/benchmark/gpu.sh check --before X   without what passed before, and is in folder X
#   scripts/benchmark/gpu.sh check --dry-run    the same on a CPU and tiny, to try it
#
# What it finds goes to $OUT (default: out/): numbers to STAGE.jsonl, what was printed to STAGE.txt, and how each part
# ended to summary.json; the exit status says whether all passed. Wheels that gather.sh collected are installed in a
# folder of their own, and only those of packages that the machine lacks: torch and all others stay as they are.
set -euo pipefail
cd "$(dirname "$0")/../.."
begun=$(date +%s)
folder=${GPU_FOLDER:-.gpu}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

dry=no
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then dry=yes; fi
done
if [ "$dry" = yes ]; then
  export OMP_WAIT_POLICY=passive # the cores may have other work
else
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  shopt -s nullglob # where everything is installed, there need be no wheels
  mapfile -t wheels < <(python3 scripts/benchmark/missing.py "$folder"/wheels/*.whl)
  if [ "${#wheels[@]}" -gt 0 ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${wheels[@]}"
  fi
  PYTHONPATH="$PYTHONPATH:$site"
fi
python3 scripts/benchmark/gpu.py --begun "$begun" --data "$folder/data" --out "${OUT:-out}" "$@"
