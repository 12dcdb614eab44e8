# `make train` and `make test` do all the set-up that a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# One thread for each numerical library: several contending ones are slower on small networks.
export OMP_NUM_THREADS ?= 1
# Many tests start Python anew, which would compile everything each time if nothing may be kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-gpu chaos checked check types lint docs lock bench clean

train: $(INSTALLED)  ## Train the cartpole preset with a live panel.
	$(BIN)/qfleet train cartpole

# Three workers for two cores: many tests wait for processes that they killed or stopped.
test: checked  ## Every check and every test but the long matrices.
	$(BIN)/python -m pytest -m "not slow" -n 3 --dist loadgroup

test-all: checked  ## Every test: kills, seeds, cut points, all algorithms.
	QFLEET_EXAMPLES=searching $(BIN)/python -m pytest -n 2 --dist loadgroup

test-gpu: $(INSTALLED)  ## Every test that needs a CUDA device, and the kernels' own tests on it.
	$(BIN)/python -m pytest -m gpu

chaos: $(INSTALLED)  ## Kill and stop processes of many runs, as seeds say; goes on where it was cut; fills benchmarks/chaos.md.
	$(BIN)/python tests/chaos/matrix.py

checked: $(INSTALLED)
	$(MAKE) --jobs 2 --output-sync check docs

check: lint types  ## Format, lint, types, import contracts, spelling.

types: $(INSTALLED)
	$(BIN)/mypy

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/codespell

docs: $(INSTALLED)  ## Build the documentation; a broken link is an error.
	$(BIN)/mkdocs build --strict --quiet --site-dir .site

bench: $(INSTALLED)  ## Measure against the peers, which get an environment of their own; fills benchmarks/.
	bash benchmarks/peers/setup.sh .peers
	$(BIN)/qfleet bench all --peers .peers --first-seed 301 --json benchmarks/results.json --table benchmarks/results.md

# torch first, by an exact pin: an open range would bring gigabytes of CUDA to a machine without a GPU.
$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0 uv==0.13.7
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --requirement requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $(INSTALLED)

lock:  ## Resolve the newest versions anew, for both supported Pythons; torch is left out on purpose.
	echo 'torch ; python_version < "0"' > .venv/no-torch.txt
	$(BIN)/uv pip compile pyproject.toml --all-extras --override .venv/no-torch.txt --universal --python-version 3.11 \
		--no-emit-index-url --no-header --annotation-style line --upgrade --output-file requirements.lock

clean:
	rm -rf .venv .site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
