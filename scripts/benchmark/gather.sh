#!/usr/bin/env bash
# Collect what gpu.sh needs on a machine without a network: wheels for CPython 3.12 on Linux, Multi30k and KFTT.
#
#   scripts/benchmark/gather.sh [CORPORA]       CORPORA holds multi30k/ and kftt/ (default: $TRANSFORMER_DATA)
#
# Everything goes into .gpu/ (or $GPU_FOLDER), which may not pass 60 MiB. torch and NumPy are never among it: the
# machine has its own. Of what the machine has besides, gpu.sh leaves the wheels alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${GPU_FOLDER:-.gpu}
corpora=${1:-${TRANSFORMER_DATA:?give the folder of corpora, or set TRANSFORMER_DATA}}
limit=60 # MiB

rm -rf "$folder"
mkdir -p "$folder/wheels" "$folder/data/multi30k" "$folder/data/kftt"
for set in train val test_2016_flickr; do
  cp "$corpora/multi30k/$set.en" "$corpora/multi30k/$set.de" "$folder/data/multi30k/"
done
for set in train dev tune; do
  cp "$corpora/kftt/$set.ja.gz" "$corpora/kftt/$set.en.gz" "$folder/data/kftt/"
done

# pyproject.toml's dependencies and those of its tests, with what they need in turn; not datasets and its own, which
# only data sets of the hub need, nor grpcio and pillow, which TensorBoard needs to show and not to write.
packages=(
  'hydra-core>=1.3.8,<1.4' 'omegaconf>=2.3,<2.4' PyYAML packaging
  'sacrebleu>=2.4' colorama lxml portalocker regex tabulate
  'sentencepiece>=0.2.3' 'safetensors>=0.4.5' 'tqdm>=4.66.3'
  'tensorboard>=2.17' absl-py markdown markupsafe protobuf tensorboard-data-server typing-extensions werkzeug
  'pytest>=8.3' 'pytest-timeout>=2.3.1' 'pytest-xdist>=3.6.1' execnet iniconfig pluggy pygments
)
platforms=()
for version in manylinux2014 manylinux_2_17 manylinux_2_24 manylinux_2_26 manylinux_2_27 manylinux_2_28; do
  platforms+=(--platform "${version}_x86_64")
done
pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.12 "${platforms[@]}" \
  --dest "$folder/wheels" "${packages[@]}"
pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" 'antlr4-python3-runtime==4.9.3' # source only, and pure Python

size=$(du -sm --apparent-size "$folder" | cut -f1)
echo "$folder: $size MiB, $(ls "$folder/wheels" | wc -l) wheels"
if [ "$size" -gt "$limit" ]; then
  echo "error: $folder has $size MiB, more than $limit: leave something out" >&2
  exit 1
fi
