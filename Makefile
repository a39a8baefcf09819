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
CHECKED := python/pie_driver_sglang tests tools benches/gpu benches/ngram_replay benches/peers benches/pie_load
# Runs the ring's sources under loom; a workspace of its own.
MODEL := --manifest-path rust/ring/model/Cargo.toml
# The load generator; a workspace of its own.
LOAD := --manifest-path benches/pie_load/Cargo.toml

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-rust test-python quick bench replay load counts fuzz lint format stubs docs wheel

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: $(VENV)/.installed ## Serve six prompts with the embedded model; ARGS="--model PATH --device cuda:0" for another
	@$(BIN)/python -m pie_driver_sglang.demo --model models/pocket $(ARGS)

PORT ?= 30000
serve: $(VENV)/.installed ## Serve the embedded model over HTTP on the CPU; PORT=30000, ARGS="--stream-interval 2" for SGLang's flags
	@$(BIN)/pie-sglang serve --model-path models/pocket --served-model-name pocket --device cpu --port $(PORT) $(ARGS)

test: test-rust test-python ## Run every test

test-rust:
	cargo test --workspace --quiet
	cargo test --manifest-path fuzz/Cargo.toml --quiet
	cargo test $(MODEL) --target-dir target/model --quiet
	cargo test $(LOAD) --target-dir target/load --quiet

test-python: $(VENV)/.installed
	$(BIN)/python -m pytest -q

quick: $(VENV)/.installed ## Run what needs no SGLang: the crates' own tests, and Python's that import neither it nor a model
	cargo test --workspace --quiet
	$(BIN)/python -m pytest -q -m "not engine"

bench: $(VENV)/.installed ## Run the benchmarks and print their table; ARGS=ring/ for some of them, ARGS=--quick to try them out
	cargo bench --manifest-path benches/Cargo.toml -- $(ARGS)
	@cargo run --quiet --release --manifest-path benches/Cargo.toml --bin report -- $(filter --quick,$(ARGS))

STREAMS := target/ngram_streams.json
$(STREAMS): benches/ngram_replay/streams.py | $(VENV)/.dependencies
	$(BIN)/python $< $@

replay: $(STREAMS) ## Replay token streams through the n-gram drafter and its peers: accepted drafts per step
	@cargo build --quiet --release --manifest-path benches/Cargo.toml --no-default-features --target-dir target --bin ngram_replay
	@$(BIN)/python benches/ngram_replay/replay.py $(STREAMS) target/release/ngram_replay

load: ## Build target/load/release/pie_load, which plays the runtime against a driver; see benches/README.md
	cargo build $(LOAD) --target-dir target/load --release --quiet

counts: ## Count the instructions of the hot paths and hold them to benches/counts.json (needs valgrind)
	@cargo run --quiet --release --manifest-path benches/Cargo.toml --no-default-features --bin counts -- $(ARGS)

TARGET ?= plan_frames
fuzz: ## Fuzz TARGET=plan_frames for a minute; ARGS=-max_total_time=600 for longer, fuzz/README.md for more
	@fuzz/run $(TARGET) -max_total_time=60 $(ARGS)

lint: $(VENV)/.installed ## Check format, lints, types, docs and the native module's stub
	cargo fmt --all --check
	cargo fmt --manifest-path benches/Cargo.toml --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	cargo clippy --manifest-path fuzz/Cargo.toml --all-targets --quiet -- -D warnings
	cargo fmt $(MODEL) --check
	cargo clippy $(MODEL) --target-dir target/model --lib --test models --quiet -- -D warnings
	cargo fmt $(LOAD) --check
	cargo clippy $(LOAD) --target-dir target/load --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(MAKE) --no-print-directory stubs STUB=target/stubs
	diff -u python/pie_driver_sglang/_core.pyi target/stubs/pie_driver_sglang/_core.pyi
	$(BIN)/stubtest pie_driver_sglang._core

format: $(VENV)/.installed ## Format the sources
	cargo fmt --all
	cargo fmt --manifest-path benches/Cargo.toml
	cargo fmt --manifest-path fuzz/Cargo.toml
	cargo fmt $(MODEL)
	cargo fmt $(LOAD)
	$(BIN)/ruff check --fix-only $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

STUB ?= python
stubs: $(VENV)/.dependencies ## Generate the native module's stub
	@$(BIN)/maturin generate-stubs --quiet --out $(STUB)

docs: $(VENV)/.dependencies ## Generate docs/options.md from the definitions of the options
	@PYTHONPATH=python $(BIN)/python tools/generate_options.py

wheel: $(WHEELS)/.built ## Build the abi3 wheel into target/wheels

# Into the wheel, for `_core.build_info`: what a measurement says it was taken of. `+`: with changes that are not committed.
$(WHEELS)/.built: $(VENV)/.dependencies $(SOURCES)
	@rm -rf $(WHEELS)
	PIE_DRIVER_COMMIT="$$(git describe --always --exclude='*' --dirty=+ 2>/dev/null)" $(BIN)/maturin build --release --locked --quiet --out $(WHEELS)
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
