#!/usr/bin/env bash
# Make the environment of the null GPU: scripts/null_gpu/setup.sh FOLDER [PYTHON]
#
# PYTHON (default: python3.12) must be 3.12, since torch's wheel of CUDA 13 is what most machines with a GPU have with
# it. Takes 5 GB of disk, and 2.5 GB from PyPI.
set -euo pipefail
folder=${1:?usage: setup.sh FOLDER [PYTHON]}
python=${2:-python3.12}
root=$(cd "$(dirname "$0")/../.." && pwd)

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || {
  echo "error: $python is not Python 3.12: name one, as in setup.sh FOLDER /usr/bin/python3.12" >&2
  exit 2
}
"$python" -m venv "$folder"
"$folder/bin/pip" install --quiet 'torch==2.11.0' -e "$root[dev,export]"
export TRANSFORMER_NULL_GPU_PYTHON
TRANSFORMER_NULL_GPU_PYTHON=$(cd "$folder/bin" && pwd)/python
"$root/scripts/null_gpu/run.sh" python -c 'import torch; print("torch", torch.__version__, "on a null", torch.cuda.get_device_name())'
echo "export TRANSFORMER_NULL_GPU_PYTHON=$TRANSFORMER_NULL_GPU_PYTHON"
