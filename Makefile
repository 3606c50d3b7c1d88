PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check docs clean

# Installed once, and again when what it installs from changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[hf]'
	$(BIN)/python -m compileall -q planner runtime reports schemas
	touch $@

$(VENV)/.tests-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	touch $@

demo: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

# Two at a time, by file: ranks are pooled in each. A bare pytest runs the same one after another.
test: $(VENV)/.tests-installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Types are checked through four links, since an editable install hides the package from mypy.
.types:
	mkdir -p .types/dsplan
	for part in planner runtime reports schemas; do ln -sfn ../../$$part .types/dsplan/$$part; done

check: $(VENV)/.tests-installed .types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.types $(BIN)/mypy -p dsplan
	$(BIN)/python -m dsplan.planner.cli docs --check

docs: $(VENV)/.installed
	$(BIN)/python -m dsplan.planner.cli docs

clean:
	rm -rf $(VENV) .types build dist demo_out
