# `make demo` and `make test` set everything up by themselves; see README.md for what the machine must have.

# The first interpreter that runs and fits.
PYTHON ?= $(shell for python in python3.12 python3.11 python3; do \
    $$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
    && echo $$python && break; done)
# The version of SGLang in the environment: what GPUs were measured with. `make test SGLANG=0.5.23` has an environment of its own.
SGLANG ?= 0.5.17
OTHER := $(filter-out 0.5.17,$(SGLANG))
VENV := .venv$(if $(OTHER),-$(OTHER))
BIN := $(VENV)/bin
# Where the tests find vLLM. Its release for the CPU is compiled for the torch of one version of SGLang: tests skip it beside another.
export PIE_VLLM_SITE ?= $(abspath $(VENV))/vllm
VLLM := $(if $(OTHER),,$(VENV)/.vllm)
# A wheel is only valid for the sources that it was built from.
SOURCES := pyproject.toml Cargo.toml Cargo.lock README.md LICENSE \
    $(shell find rust python -type f \( -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name '*.toml' \))
WHEELS := target/wheels
# A wheel needs maturin alone: without the environment it gets one of its own.
BUILDER := target/builder
MATURIN := $(if $(wildcard $(BIN)/maturin),$(BIN)/maturin,$(BUILDER)/bin/maturin)
CHECKED := python/pie_driver_sglang python/pie_driver_vllm tests tools benches/gpu benches/grammar_suite benches/ngram_replay benches/peers benches/pie_load
# Runs the ring's sources under loom: a workspace of its own, which builds where the product does.
LOOM := --manifest-path rust/ring/model/Cargo.toml --target-dir target

.DEFAULT_GOAL := help
.PHONY: help preflight demo serve test build-rust test-rust test-python quick quick-rust quick-python conformance bench replay suffix load gateway-cost grammar-suite grammar-coverage counts fuzz sanitize soak lint lint-rust lint-python workflows format stubs docs fetch wheel

USERS := demo serve wheel
help: ## Show this list
	@list() { grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18; }; \
	users='^($(subst $() $(),|,$(USERS))) '; echo "To use it:"; list | grep -E "$$users"; \
	echo; echo "To develop it:"; list | grep -Ev "$$users"

preflight: ## Check this machine for the prerequisites of a build and of the tests; fetches nothing
	@tools/preflight "$(PYTHON)" . $(GIB) && echo "preflight: nothing is missing"

demo: $(VENV)/.installed ## Serve SmolLM2 on the CPU and ask it: six samplers at a time, JSON, a tool call; ARGS="--device cuda" for a GPU
	@$(BIN)/pie-sglang demo $(ARGS)

MODEL ?= smollm2
PORT ?= 30000
serve: $(VENV)/.installed ## Serve SmolLM2 over HTTP on the CPU; MODEL=models/pocket PORT=30000, ARGS="--stream-interval 2" for SGLang's flags
	@$(BIN)/pie-sglang serve $(MODEL) --device cpu --port $(PORT) $(ARGS)

# The environment, which waits for the network, and the wheel, whose end is one long link, come while the tests are built.
# The crates' tests, half of whose time is waiting, run beside Python's.
test: ## Run every test
	@test -e $(VENV)/.dependencies || tools/preflight "$(PYTHON)" . $(GIB)
	@$(MAKE) --no-print-directory --jobs=2 build-rust $(VENV)/.compiled $(VLLM)
	@$(MAKE) --no-print-directory --jobs=2 test-rust test-python

build-rust:
	cargo test --workspace --quiet --no-run
	cargo test $(LOOM) --quiet --no-run

# Half an hour is ten times what they take: what hangs is named.
test-rust:
	@tools/within 1800 cargo test --workspace --quiet
	@tools/within 1800 cargo test $(LOOM) --quiet

# Processes that share the tests; each has a driver to fork from, which imports SGLang. `tests/conftest.py` says what stays together.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

test-python: $(VENV)/.installed $(VENV)/.compiled $(VLLM)
	$(PYTEST)

quick: $(VENV)/.installed ## Run the tests that need no SGLang: the crates' own, and those of Python that load neither SGLang nor a model
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target quick-rust quick-python

# Programs of tests that wait more than they compute leave Python a core.
quick-rust:
	PIE_FUZZ_DAMAGED=1000 cargo test --workspace --quiet

quick-python:
	$(PYTEST) -m "not engine"

conformance: $(VENV)/.installed $(VENV)/.compiled ## Run SGLang's complete test kits, two clients and schemathesis against the server; fetches packages
	PIE_CONFORMANCE=1 $(BIN)/python -m pytest -q tests/test_conformance.py tests/serve tests/test_gateway.py tests/test_gateway_replicas.py $(ARGS)

bench: $(VENV)/.installed ## Run the benchmarks and print their table; ARGS=ring/ for some of them, ARGS=--quick to try them out
	cargo bench --manifest-path benches/Cargo.toml -- $(ARGS)
	@cargo run --quiet --release --manifest-path benches/Cargo.toml --bin report -- $(filter --quick,$(ARGS))

STREAMS := target/ngram_streams.json
$(STREAMS): benches/ngram_replay/streams.py | $(VENV)/.dependencies
	$(BIN)/python $< $@

replay: $(STREAMS) ## Compare the n-gram drafter with its baselines on recorded streams: accepted drafts per step
	@cargo build --quiet --release --manifest-path benches/Cargo.toml --no-default-features --target-dir target --bin ngram_replay
	@$(BIN)/python benches/ngram_replay/replay.py $(STREAMS) target/release/ngram_replay

suffix: $(STREAMS) ## Compare suffix decoding with n-gram drafts on the same streams, and those in REAL=FILE
	@cargo build --quiet --release --manifest-path benches/Cargo.toml --no-default-features --target-dir target --bin ngram_replay
	@$(BIN)/python benches/ngram_replay/suffix.py target/release/ngram_replay $(STREAMS) $(REAL)

load: ## Build the load generator target/load/release/pie_load, which takes the place of the runtime; see benches/README.md
	cargo build --package pie-load --target-dir target/load --release --quiet

gateway-cost: ## Measure the CPU time of a streamed token in the runtime and its gRPC service; ARGS="--streams 16"
	@cargo run --package gateway_cost --target-dir target/load --release --quiet -- $(ARGS)

counts: ## Count instructions of the hot paths and compare them with benches/counts.json (needs valgrind)
	@cargo run --quiet --release --manifest-path benches/Cargo.toml --no-default-features --bin counts -- $(ARGS)

grammar-suite: $(VENV)/.installed ## Compare the time of grammar masks and compilation with xgrammar's, on the JSON schema test suite and a store of schemas
	@cargo build --quiet --release --manifest-path benches/Cargo.toml --target-dir target/bench --bin grammar_suite
	@$(BIN)/python benches/grammar_suite/run.py target/bench/release/grammar_suite $(ARGS)

grammar-coverage: $(VENV)/.installed ## Count the schemas that compile, and wrong masks, over the JSON schema test suite and JSONSchemaBench
	@cargo build --quiet --release --manifest-path benches/Cargo.toml --target-dir target/bench --bin grammar_coverage
	@$(BIN)/python benches/grammar_suite/grammar_coverage.py target/bench/release/grammar_coverage $(ARGS)

TARGET ?= plan_frames
fuzz: ## Fuzz TARGET=plan_frames for a minute; ARGS=-max_total_time=600 for longer, fuzz/README.md for more
	@fuzz/run $(TARGET) -max_total_time=60 $(ARGS)

sanitize: ## Run the crates' tests under AddressSanitizer and ThreadSanitizer; ARGS="thread pie-ring" for some of them
	@tools/sanitize $(ARGS)

soak: $(VENV)/.installed ## Soak test: 20 minutes of invalid requests and killed processes, in which no request may be lost; ARGS="--minutes 60" for longer
	@PYTHONPATH=tests $(BIN)/python -m support.hostile.soak $(ARGS)

# Python's tools use one core, and cargo's last crates another.
lint: $(VENV)/.installed workflows ## Check format, lints, types, docs, workflows and the native module's stub
	@$(MAKE) --no-print-directory --jobs=2 lint-rust lint-python

lint-rust:
	cargo fmt --all --check
	cargo fmt --manifest-path benches/Cargo.toml --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo fmt --manifest-path rust/ring/model/Cargo.toml --check
	cargo clippy $(LOOM) --lib --test models --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

# The stub is read from a module of what the wheel was built of: a build in the debug profile would compile half of the
# dependencies again, with the features that this one crate wants. The module keeps its symbols, by which the stub is found.
lint-python: $(VENV)/.installed
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(MAKE) --no-print-directory stubs STUB=target/stubs AS="--profile release -- -C opt-level=0 -C strip=debuginfo"
	diff -u python/pie_driver_sglang/_core.pyi target/stubs/pie_driver_sglang/_core.pyi
	$(BIN)/stubtest pie_driver_sglang._core

# The schema and the audit need no network. `actionlint`, which also reads expressions and scripts, is no Python package; CI has it.
workflows: $(VENV)/.dependencies ## Check the GitHub workflows: schema, security, and actionlint if it is in PATH
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --no-progress --quiet .github
	@if command -v actionlint >/dev/null; then actionlint; else echo "actionlint is not in PATH: CI runs it"; fi

format: $(VENV)/.installed ## Format the sources
	cargo fmt --all
	cargo fmt --manifest-path benches/Cargo.toml
	cargo fmt --manifest-path rust/ring/model/Cargo.toml
	$(BIN)/ruff check --fix-only $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

STUB ?= python
stubs: $(VENV)/.dependencies ## Generate the native module's stub
	@$(BIN)/maturin generate-stubs --quiet --out $(STUB) $(AS)

docs: $(VENV)/.dependencies ## Generate docs/options.md from the options; docs/benchmarks.md and benches/RESULTS.md from benches/results
	@PYTHONPATH=python $(BIN)/python tools/generate_options.py
	@$(BIN)/python tools/generate_benchmarks.py

fetch: ## Fetch the crates, for builds without a network
	cargo fetch --locked
	cargo fetch --locked --manifest-path rust/frontends/definitions/Cargo.toml

wheel: $(WHEELS)/.built ## Build the abi3 wheel into target/wheels

# Into the wheel, for `_core.build_info`: what a measurement says it was taken of. `+`: with changes that are not committed.
$(WHEELS)/.built: $(SOURCES) | $(MATURIN)
	@rm -rf $(WHEELS)
	PIE_DRIVER_COMMIT="$$(git describe --always --exclude='*' --dirty=+ 2>/dev/null)" $(MATURIN) build --release --locked --quiet --out $(WHEELS)
	@touch $@

# Disk space in GiB of the environment, with the build's.
GIB := 14
# Where Python is told to write no bytecode, every start would compile 7,000 modules again: what is started from here writes it.
unexport PYTHONDONTWRITEBYTECODE

# uv's cache makes a second environment cheap.
$(VENV)/.dependencies: pyproject.toml
	@test -e $@ || tools/preflight "$(PYTHON)" . $(GIB)
	@test -x $(BIN)/uv || { echo "making $(VENV); its packages take 9 GB"; $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv; }
	$(BIN)/uv pip install --python $(BIN)/python sglang==$(SGLANG) -r pyproject.toml --extra demo --group dev
	@touch $@

$(BUILDER)/bin/maturin:
	@tools/preflight "$(PYTHON)" . 2 build
	$(PYTHON) -m venv $(BUILDER)
	$(BUILDER)/bin/python -m pip install --quiet 'maturin>=1.16,<2'

# The bytecode of SGLang and what it imports, written once: processes that begin at the same time would each compile all of it.
$(VENV)/.compiled: $(VENV)/.dependencies | $(VENV)/.installed
	@PYTHONPATH=tests $(BIN)/python -W ignore -c "import support.process.fork_preload"
	@touch $@

# vLLM for the tests of its driver, in a folder of its own: SGLang looks for it, too, and must not find it.
$(VENV)/.vllm: tests/vllm-requirements.txt $(VENV)/.dependencies
	@rm -rf $(VENV)/vllm
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(VENV)/vllm --no-deps --require-hashes -r $<
	@touch $@

$(VENV)/.installed: $(VENV)/.dependencies $(WHEELS)/.built
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --reinstall $(WHEELS)/*.whl
	@touch $@
