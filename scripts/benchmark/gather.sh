#!/usr/bin/env bash
# Collect what gpu.sh needs on a machine without a network: three wheels for Python 3, and a corpus.
#
#   scripts/benchmark/gather.sh                  Multi30k, for every stage but learn
#   scripts/benchmark/gather.sh learn            KFTT, for the stage learn
#
# TRANSFORMER_DATA is the folder of corpora, which holds multi30k/ and kftt/. Everything goes into .gpu/ (or
# $GPU_FOLDER). Together with the files that git tracks it may not pass 64 MiB, which is what may travel.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${GPU_FOLDER:-.gpu}
limit=$((64 << 20)) # bytes

case ${1:-} in
  learn) corpus=kftt files=({train,dev,tune}.{ja,en}.gz) ;;
  "" | check | compare | kernels | minute) corpus=multi30k files=({train,val,test_2016_flickr}.{en,de}) ;;
  *)
    echo "error: $1 is no stage: choose from check, compare, learn, kernels, minute" >&2
    exit 2
    ;;
esac
corpora=${TRANSFORMER_DATA:?is not set: it is the folder of corpora}

rm -rf "$folder"
mkdir -p "$folder/wheels" "$folder/data/$corpus"
for file in "${files[@]}"; do
  cp "$corpora/$corpus/$file" "$folder/data/$corpus/"
done

# What images for PyTorch have not got; all are pure Python. The package's other dependencies, and those of its tests,
# are expected there: data sets of the hub alone need `datasets`.
pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" \
  'hydra-core>=1.3.8,<1.4' 'omegaconf>=2.3,<2.4' 'antlr4-python3-runtime==4.9.3'

# bytes_of: the sizes of the files named on standard input, added up.
bytes_of() { xargs -0 stat --format=%s -- | awk '{sum += $1} END {print sum + 0}'; }
tree=$(git ls-files -z | bytes_of)
bundle=$(find "$folder" -type f -print0 | bytes_of)
echo "$folder: $((bundle >> 10)) KiB, $(ls "$folder/wheels" | wc -l) wheels; the tracked files: $((tree >> 10)) KiB"
if [ $((tree + bundle)) -gt "$limit" ]; then
  echo "error: together more than $((limit >> 10)) KiB: leave something out" >&2
  exit 1
fi
