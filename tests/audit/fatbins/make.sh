#!/bin/sh
# Makes the fat binaries that test_fatbin.py reads: what nvcc 13.0 writes for known options. Run it with nvcc
# and objcopy on PATH; the tests need neither.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >k.cu <<'SOURCE'
__global__ void k(float *x) { x[threadIdx.x] *= 2; }
SOURCE

make() { # NAME SECTION OPTION...: the section of the object that nvcc makes
  name=$1 section=$2
  shift 2
  nvcc -Xcompiler -fPIC -c k.cu -o k.o "$@"
  objcopy -O binary -j "$section" --set-section-flags "$section=alloc" k.o "$here/$name.fatbin"
}

make plain .nv_fatbin --no-compress -gencode arch=compute_75,code=sm_75 \
  -gencode arch=compute_120,code=compute_120
make lz4 .nv_fatbin --compress-mode=speed -gencode 'arch=compute_90a,code=[sm_90a,compute_90a]'
make zstd .nv_fatbin --compress-mode=size -gencode arch=compute_100f,code=sm_100f \
  -gencode 'arch=compute_120,code=[sm_120,compute_120]'
make relocatable __nv_relfatbin -rdc=true -gencode 'arch=compute_80,code=[sm_80,compute_80]'
make lto __nv_relfatbin -rdc=true -gencode arch=compute_80,code=lto_80
