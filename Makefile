# `make demo` and `make test` need Python 3.11 or newer and nothing else: they make .venv on the first call.

PYTHON ?= python3
EXTRAS ?= cpu dev megatron
RECIPE ?= recipes/grpo-reverse-digits-1n4r-fsdp2-tp2.yaml
ARGS ?=
BIN := .venv/bin

.PHONY: demo test test-slow test-fast lint docs environment clean

demo: environment
	$(BIN)/refit-transport grpo --config $(RECIPE) $(ARGS)

test: environment
	$(BIN)/python -m pytest -m "not gpu and not slow" $(ARGS)

# One process per folder: engines that a process once started stay in its memory.
test-slow: environment
	@failed=0; for folder in tests/rl tests/engines tests/equality tests/bench tests/megatron tests/cluster; do \
	  $(BIN)/python -m pytest -m "slow and not gpu" $$folder $(ARGS); code=$$?; \
	  [ $$code = 0 ] || [ $$code = 5 ] || failed=1; done; exit $$failed

test-fast: environment
	$(BIN)/python -m pytest -m "not gpu and not engine and not slow and not netns" $(ARGS)

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs:
	@$(PYTHON) .ci/environment.py docs
	$(BIN)/python -m refit_transport.config.document docs/configuration.md
	$(BIN)/python -m refit_transport.config.support_page docs/support-matrix.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

environment:
	@$(PYTHON) .ci/environment.py $(EXTRAS)

clean:
	rm -rf .venv site results build *.egg-info
