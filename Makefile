# make run   sets everything up and opens the explorer        make test   sets everything up and runs the tests
# make gpu-check   checks a CUDA GPU against the CPU and measures it, with the engine's libraries only; TORCH=2.11.0 for another PyTorch
# Options:   make run ARGS="--model owner/name --port 7861"   PYTHON=python3.12 to choose the interpreter (after `make clean`, if there is an environment already)
#            VENV=/some/folder to put the environment elsewhere

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
RELEASE := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.txt)
TORCH ?= $(RELEASE)
GPU_VENV := .venv-gpu-$(TORCH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test gpu-check lint clean

run: $(VENV)/.run
	$(BIN)/python app.py $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)
	@if command -v node >/dev/null; then node --test tests/stage/*.test.mjs; \
	elif [ "$(RIVER_REQUIRE_NODE)" = 1 ]; then echo "node is not installed, and RIVER_REQUIRE_NODE=1 demands the tests of the page's scripts"; exit 1; \
	else echo "node is not installed: the tests of the page's scripts were skipped"; fi

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The time limit of five minutes is the command's; PyTorch's CUDA build (gigabytes) is downloaded before that, once.
gpu-check: $(GPU_VENV)/.engine
	$(GPU_VENV)/bin/python -m river_core gpu-check $(ARGS)

clean:
	rm -rf $(VENV) .venv-gpu-*

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "River Explorer needs Python 3.11 or newer, which $(PYTHON) is not; try: make PYTHON=python3.12"; exit 1; }
	@mkdir -p "$(VENV)" 2>/dev/null && [ -w "$(VENV)" ] || { \
	  echo "The environment cannot be written to $(VENV) in this folder; put it elsewhere, for example: make run VENV=/tmp/river-explorer"; exit 1; }
	@rm -f "$(VENV)/.torch" "$(VENV)/.run" "$(VENV)/.dev"
	@$(PYTHON) -m venv "$(VENV)" || { rm -f "$(BIN)"/python*; echo "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

# PyTorch first. Its default Linux wheels carry gigabytes of GPU libraries: without an NVIDIA GPU the CPU index is asked for its build, and
# only if that cannot be reached the default index. macOS wheels are small anyway.
$(VENV)/.torch: | $(BIN)/python
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  $(BIN)/python -m pip install torch==$(RELEASE) --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 0 2>/dev/null \
	  || $(BIN)/python -m pip install torch==$(RELEASE); \
	else $(BIN)/python -m pip install torch==$(RELEASE); fi
	@touch $@

$(GPU_VENV)/.engine: requirements-engine.txt
	@if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ] && ! command -v nvidia-smi >/dev/null; then \
	  echo "There is no NVIDIA GPU here, so nothing was installed and nothing was checked."; exit 1; fi
	@$(PYTHON) -m venv $(GPU_VENV) || { rm -rf $(GPU_VENV); echo "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(GPU_VENV)/bin/python -m pip install -r requirements-engine.txt torch==$(TORCH)
	@touch $@

# Without the line that names the CPU index: PyTorch is there by now, and pip would ask that index for every other library as well.
$(VENV)/.run: requirements.txt $(VENV)/.torch
	@sed '/^--extra-index-url/d' requirements.txt >$(VENV)/requirements.txt
	$(BIN)/python -m pip install -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	$(BIN)/python -m pip install -r $(VENV)/requirements.txt -r requirements-dev.txt
	@touch $@
