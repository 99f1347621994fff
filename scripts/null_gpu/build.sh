#!/usr/bin/env bash
# Build the null GPU's libraries for the environment of a Python: build.sh PYTHON FOLDER
#
# Needs g++ and nm. Headers, and the names of all functions, come from the wheels that torch brought along: what the
# sources here do not define is counted as a "stub" and succeeds.
set -euo pipefail
cd "$(dirname "$0")"
site=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
packages=$site/nvidia
mkdir -p "$2"
out=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
include=(-I"$packages/cu13/include" -I"$site/triton/backends/nvidia/include") # its crt/

# functions LIBRARY: the names of those that it defines.
functions() {
  nm -D --defined-only "$1" | awk '$2 ~ /[TWi]/ {print $3}' | sed 's/@.*//' | grep -E "^_{0,2}(cu|p?nccl)" | sort -u
}

# make_library SOURCE LIBRARY NAMES OPTION...: from our source, with a stub for each of these names that it lacks.
make_library() {
  local source=$1 library=$2 names=$3
  shift 3
  g++ -std=c++17 -O1 -fPIC "${include[@]}" -c "$source.cpp" -o "$work/$source.o"
  nm "$work/$source.o" | awk '$2 == "T" {print $3}' | sort -u >"$work/ours"
  {
    echo 'void null_gpu_count(const char*, const char*);'
    sort -u "$names" | comm -23 - "$work/ours" | sed 's/.*/int &(void) { null_gpu_count("stub", "&"); return 0; }/'
  } >"$work/stubs.c"
  gcc -fPIC -fno-builtin -c "$work/stubs.c" -o "$work/stubs.o"
  echo "$library { global: *; };" >"$work/version"
  g++ -shared -Wl,-soname,"$library" -Wl,--version-script="$work/version" -o "$work/$library" \
    "$work/$source.o" "$work/stubs.o" "$@" -ldl
  mv "$work/$library" "$out/$library"
}

functions "$packages/cu13/lib/libcudart.so.13" >"$work/cudart"
make_library runtime libcudart.so.13 "$work/cudart"
runtime=$out/libcudart.so.13

functions "$packages/cu13/lib/libcublas.so.13" >"$work/cublas"
make_library cublas libcublas.so.13 "$work/cublas" "$runtime"
functions "$packages/cu13/lib/libcublasLt.so.13" >"$work/cublas_lt"
make_library cublas_lt libcublasLt.so.13 "$work/cublas_lt" "$runtime"
functions "$packages/nccl/lib/libnccl.so.2" >"$work/nccl"
make_library nccl libnccl.so.2 "$work/nccl" "$runtime"

# The driver is no wheel: its functions are those that its header declares.
echo '#include <cuda.h>' | gcc -E -P "${include[@]}" - | grep -oE '\bcu[A-Z]\w*\(' | tr -d '(' | sort -u >"$work/cuda"
make_library driver libcuda.so.1 "$work/cuda" "$runtime"
