#!/usr/bin/env bash
# Run a command on the null GPU: scripts/null_gpu/run.sh COMMAND...
#
# TRANSFORMER_NULL_GPU_PYTHON is the Python of an environment that setup.sh has made; its programs come first on the
# command's path. The libraries are built when they are first needed, beside that environment. README.md has the
# variables that say which card it is, and what is wrong with it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${TRANSFORMER_NULL_GPU_PYTHON:?is not set: scripts/null_gpu/setup.sh FOLDER makes an environment, and says how}
bin=$(cd "$(dirname "$python")" && pwd)

case ${NULL_GPU_CAPABILITY:-90} in
  70 | 75 | 80 | 86 | 90) ;;
  *)
    echo "error: NULL_GPU_CAPABILITY=$NULL_GPU_CAPABILITY: choose from 70, 75, 80, 86, 90" >&2
    exit 2
    ;;
esac

# Libraries are named after their sources, so that several clones can share an environment.
digest=$(cat "$here"/*.cpp "$here"/*.h "$here/build.sh" | sha256sum | cut -c1-12)
libraries=$(dirname "$bin")/null_gpu/$digest
if [ ! -d "$libraries" ]; then
  fresh=$libraries.$$
  "$here/build.sh" "$python" "$fresh"
  mv -T "$fresh" "$libraries" 2>/dev/null || rm -rf "$fresh" # another process was faster
fi

export PATH="$bin:$PATH"
export PYTHONPATH="$here:$(cd "$here/../.." && pwd)${PYTHONPATH:+:$PYTHONPATH}" # sitecustomize.py, and the package
export TRITON_LIBCUDA_PATH="$libraries" LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
preload=
for name in libcudart.so.13 libcublas.so.13 libcublasLt.so.13 libnccl.so.2 libcuda.so.1; do
  preload+=" $libraries/$name"
done
LD_PRELOAD=$preload exec "$@"
