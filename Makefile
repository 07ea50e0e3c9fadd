# Two commands for users: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := fedstale traces strategies agents tests benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help setup demo format lint typecheck test test-system test-pages test-changed test-flower test-libraries test-all docs build lock check clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

# Torch goes first and alone: resolved together with the rest, pip may pick a CUDA build.
$(VENV)/torch.stamp: constraints.txt
	@echo "making $(VENV): 1.6 GB for the demo, which takes minutes"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	@echo "installing torch, half of it"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/run.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "installing fedstale, Flower and what they need"
	@$(PIP) -c constraints.txt -e ".[server,torch]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing what tests and checks need, 1 GB more"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

setup: $(VENV)/dev.stamp ## install everything that development needs

demo: $(VENV)/run.stamp ## simulate the built-in app on synthetic devices
	$(BIN)/fedstale simulate digits --out runs/demo --overwrite
	@echo "from now on: source $(BIN)/activate, then fedstale; or $(BIN)/fedstale"

format: setup ## format the sources
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)

lint: setup ## check style
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

typecheck: setup ## check types, and that editors find every import
	$(BIN)/mypy -p fedstale
	$(BIN)/basedpyright --warnings

test: setup ## run the everyday tests; takes a few minutes
	$(BIN)/python -m pytest -n auto $(OPTIONS)

test-system: setup ## run what starts processes: deployments, kills, browsers, clusters, examples
	$(BIN)/python -m pytest -n auto tests/system

test-pages: setup ## check the pages and the figures that they publish
	$(BIN)/python -m pytest -n auto benchmarks/tests

test-changed: setup ## run of these two what a change since BASE touches
	$(BIN)/python tests/affected.py --run $(BASE)

# Another Flower in an environment of its own. Its nightly is a distribution of another name, so it
# takes the place of a release. What Flower itself asks for in other versions is left to pip.
FLOWER ?= 1.34.0 1.36.0 1.38.0 1.40.0 1.41.0 1.42.0 nightly

.venv-%/stamp: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-$*
	grep -vE '^(flwr|certifi|cryptography|uv)==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	.venv-$*/bin/python -m pip install --quiet -c .venv-$*/constraints.txt \
		$(if $(filter nightly,$*),,"flwr==$*") -e ".[dev]"
	$(if $(filter nightly,$*),.venv-$*/bin/python -m pip uninstall --quiet --yes flwr)
	$(if $(filter nightly,$*),.venv-$*/bin/python -m pip install --quiet --no-deps --pre flwr-nightly)
	@touch $@

test-flower: $(FLOWER:%=.venv-%/stamp) ## run what stands on Flower with others; FLOWER=1.41.0 for one
	@for each in $(FLOWER); do .venv-$$each/bin/python -P tests/other_flower.py || failed=1; done; exit $${failed:-0}

# Beside the pinned ones, whatever is newest; torch and Flower stay those of constraints.txt.
LIBRARIES := .venv-libraries
NEWEST := wandb mlflow joblib scikit-learn tensorboard pandas lightning

test-libraries: setup ## run small apps with the newest of the libraries that people call
	$(PYTHON) -m venv $(LIBRARIES)
	grep -E '^(torch|flwr|numpy)==' constraints.txt > $(LIBRARIES)/constraints.txt
	$(LIBRARIES)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(LIBRARIES)/bin/python -m pip install --quiet -c $(LIBRARIES)/constraints.txt -e ".[dev]"
	$(LIBRARIES)/bin/python -m pip install --quiet --upgrade -c $(LIBRARIES)/constraints.txt $(NEWEST)
	$(LIBRARIES)/bin/python -m pytest tests/system/simulation/test_libraries.py tests/system/project/test_examples.py

# For the accessibility check of pages, which is skipped where npm is not there.
node_modules/axe-core:
	-npm install --silent --no-save --no-package-lock axe-core@4.14.1

test-all: setup node_modules/axe-core ## run all three, with what is slow
	$(BIN)/python -m pytest --hypothesis-profile=default -m '' tests benchmarks/tests

$(VENV)/docs.stamp: $(VENV)/dev.stamp
	$(PIP) -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(VENV)/docs.stamp ## build the pages into build/site, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

build: setup ## build a source archive, and the wheel of it
	$(BIN)/python -m build --outdir dist

lock: setup ## write the hashes of what a server installs, by constraints.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--constraint constraints.txt --extra server pyproject.toml -o docs/deploy/requirements.lock
	sed -i '1i # The packages that a server needs, for Python 3.11 on Linux, with the hashes of their files. Made by "make lock".' \
		docs/deploy/requirements.lock

check: lint typecheck test ## what a commit must pass

clean: ## remove everything that is made
	rm -rf $(VENV) dist build runs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
