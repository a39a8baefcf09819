# `make demo` and `make test` set everything up by themselves; see README.md for what the machine must have.

# The first interpreter that runs and fits.
PYTHON ?= $(shell for python in python3.12 python3.11 python3; do \
    $$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
    && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
# A wheel is only valid for the sources that it was built from.
SOURCES := pyproject.toml Cargo.toml Cargo.lock README.md LICENSE \
    $(shell find rust python -type f \( -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name '*.toml' \))
WHEELS := target/wheels
CHECKED := python/pie_driver_sglang tests tools benches/gpu

.DEFAULT_GOAL := help
.PHONY: help demo test test-rust test-python bench lint format stubs wheel

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: $(VENV)/.installed ## Serve six prompts with the embedded model; ARGS="--model PATH --device cuda:0" for another
	@$(BIN)/python -m pie_driver_sglang.demo --model models/pocket $(ARGS)

test: test-rust test-python ## Run every test

test-rust:
	cargo test --workspace --quiet

test-python: $(VENV)/.installed
	$(BIN)/python -m pytest -q

bench: ## Run the benchmarks and print their table; ARGS=ring/ for some of them, ARGS=--quick to try them out
	cargo bench --manifest-path benches/Cargo.toml -- $(ARGS)
	@cargo run --quiet --release --manifest-path benches/Cargo.toml -- $(filter --quick,$(ARGS))

lint: $(VENV)/.installed ## Check format, lints, types, docs and the native module's stub
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(MAKE) --no-print-directory stubs STUB=target/stubs
	diff -u python/pie_driver_sglang/_core.pyi target/stubs/pie_driver_sglang/_core.pyi
	$(BIN)/stubtest pie_driver_sglang._core

format: $(VENV)/.installed ## Format the sources
	cargo fmt --all
	$(BIN)/ruff check --fix-only $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

STUB ?= python
stubs: $(VENV)/.dependencies ## Generate the native module's stub
	@$(BIN)/maturin generate-stubs --quiet --out $(STUB)

wheel: $(WHEELS)/.built ## Build the abi3 wheel into target/wheels

$(WHEELS)/.built: $(VENV)/.dependencies $(SOURCES)
	@rm -rf $(WHEELS)
	$(BIN)/maturin build --release --locked --quiet --out $(WHEELS)
	@touch $@

# uv's cache makes a second environment cheap.
$(VENV)/.dependencies: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 with venv is needed. Set PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv; }
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra demo --group dev
	@touch $@

$(VENV)/.installed: $(WHEELS)/.built
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --reinstall $(WHEELS)/*.whl
	@touch $@
