# make run   sets everything up and opens the explorer        make test   sets everything up and runs the tests
# make gpu-check   checks a CUDA GPU against the CPU and measures it, with the engine's libraries only; TORCH=2.11.0 for another PyTorch
# Options:   make run ARGS="--model owner/name --port 7861"   PYTHON=python3.12 to choose the interpreter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
TORCH ?= 2.13.0
GPU_VENV := .venv-gpu-$(TORCH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test gpu-check lint clean

run: $(VENV)/.run
	$(BIN)/python app.py $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)
	@if command -v node >/dev/null; then node --test tests/stage/*.test.mjs; else echo "node is not installed: the tests of the page's scripts were skipped"; fi

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The time limit of five minutes is the command's; PyTorch's CUDA build (gigabytes) is downloaded before that, once.
gpu-check: $(GPU_VENV)/.engine
	$(GPU_VENV)/bin/python -m river_core gpu-check $(ARGS)

clean:
	rm -rf $(VENV) .venv-gpu-*

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "River Explorer needs Python 3.11 or newer; try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

# PyTorch first. Its default Linux wheels carry gigabytes of GPU libraries: without an NVIDIA GPU the CPU index is asked for its build, and
# only if that cannot be reached the default index. macOS wheels are small anyway.
$(VENV)/.torch: | $(BIN)/python
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  $(BIN)/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 0 2>/dev/null \
	  || $(BIN)/pip install torch==2.13.0; \
	else $(BIN)/pip install torch==2.13.0; fi
	@touch $@

$(GPU_VENV)/.engine: requirements-engine.txt
	@if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ] && ! command -v nvidia-smi >/dev/null; then \
	  echo "There is no NVIDIA GPU here, so nothing was installed and nothing was checked."; exit 1; fi
	@$(PYTHON) -m venv $(GPU_VENV) || { rm -rf $(GPU_VENV); echo "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(GPU_VENV)/bin/pip install -r requirements-engine.txt torch==$(TORCH)
	@touch $@

$(VENV)/.run: requirements.txt requirements-engine.txt $(VENV)/.torch
	$(BIN)/pip install -r requirements.txt
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	$(BIN)/pip install -r requirements-dev.txt
	@touch $@
