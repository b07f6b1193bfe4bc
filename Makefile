# Everything runs from here; each target sets up what it needs.
#   make demo    see the methods at work       make test    pass the tests
#   make check   lint, format, types           make bench-cost  time and memory of a step (hours)
#   make sheets  draw the docs' pictures anew  make readme  the docs' tables from their records
#   make bench-calibration, bench-guard  the choice of layers, and what the guard promises (hours)
#   make bench-tables  what docs/results.md still lacks (days; stopped in any way, it goes on)
#   make test-slow (killed runs), test-cluster (Ray), test-browser (the report in Chromium)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-cluster test-browser check format demo readme examples bench-cost bench-calibration \
	bench-guard bench-tables sheets clean

help:
	@sed -n '2,7s/^# *//p' Makefile

setup: $(READY)

# Installed anew only when what it installs has changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "bestta needs Python 3.11 or newer; %s is %d.%d. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" % (sys.executable, v[0], v[1]))'
	@echo "Setting up $(VENV) (a minute or two the first time: PyTorch is large) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)
	@echo "Ready."

test: setup
	@$(BIN)/python -m pytest
	@echo
	@echo "All beliefs hold. Next: 'make demo' to see the method at work, 'make check' before a commit."

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

demo: setup
	@$(BIN)/bestta demo

# Runs killed at random, and torn files: minutes.
test-slow: setup
	@$(BIN)/python -m pytest tests/slow
	@echo "Runs survive."

# Two nodes of Ray on this machine.
test-cluster: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,cluster]'
	@$(BIN)/python -m pytest tests/cluster
	@echo "A cluster gives the same records."

# Needs a Chromium: on Debian, apt-get install chromium.
test-browser: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	@$(BIN)/python -m pytest tests/browser
	@echo "The page works; look at its screenshots, too."

examples: setup
	@for example in examples/*.py; do echo "== $$example"; $(BIN)/python $$example || exit 1; done

# What a step of every method costs beside the plain forward, and what the cheap forms cost in score.
# Stopped in any way, the same command goes on.
COST = runs/cost
bench-cost: setup
	@$(BIN)/python benchmarks/cost.py --work $(COST) --out $(COST)/record.json
	@$(BIN)/python benchmarks/cost_plot.py $(COST)/record.json --out $(COST)/cost.svg
	@$(BIN)/python benchmarks/cost_quality.py --work $(COST)/quality

# CITYSCAPES and CIFAR10 name the folders of these data sets; without, their models are left out.
SETS = $(if $(CITYSCAPES),--cityscapes $(CITYSCAPES)) $(if $(CIFAR10),--cifar10 $(CIFAR10))
bench-calibration: setup
	@$(BIN)/python benchmarks/other_models.py
	@$(BIN)/python benchmarks/calibration.py $(SETS) --out runs/calibration/record.json

bench-guard: setup
	@$(BIN)/python benchmarks/guard.py --all $(SETS) --out runs/guard/record.json

bench-tables: setup
	@$(BIN)/python benchmarks/tables.py $(SETS)

readme: setup
	@$(BIN)/python benchmarks/readme_table.py
	@$(BIN)/python benchmarks/cost_table.py
	@$(BIN)/python benchmarks/results_page.py
	@for table in calibration guard; do test ! -e results/measured/$$table.json || \
		$(BIN)/python benchmarks/$${table}_table.py; done

# What the data looks like, for docs/data.md; and what the methods see, once the demo has run.
PREVIEW = $(BIN)/bestta data preview streets --split val --colours 256
sheets: setup
	@$(PREVIEW) --count 16 --out docs/streets.png
	@$(PREVIEW) --size 512x256 --show weather --out docs/weather.png
	@$(PREVIEW) --size 512x256 --show corruptions --width 160 --out docs/corruptions.png
	@$(BIN)/bestta data preview streets --split val --size 32x32 --show corruptions --family cifar \
		--width 96 --colours 256 --out docs/corruptions-cifar.png
	@test ! -e demo/records || $(BIN)/python benchmarks/pictures.py demo/records --out docs/results-pictures.png

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
