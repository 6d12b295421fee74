# The five commands a contributor needs; CONTRIBUTING.md has more.
.PHONY: setup test test-all lint docs
export OMP_NUM_THREADS = 1
parallel = -n 2 --dist loadscope

setup: # into the active virtual environment; exactly this torch, as any other may bring gigabytes of CUDA libraries
	python -m pip install --upgrade pip
	python -m pip install torch==2.13.0
	python -m pip install --editable . --group dev

test: # the fast tests: two minutes
	python -m pytest -m "not slow and not nightly" $(parallel)

test-all: test # all but the nightly ones: half an hour
	python -m zoo.harness.megatron.wheels
	python -m pytest -m "slow and not nightly" $(parallel)

lint:
	ruff format --check .
	ruff check .
	mypy

docs: # the site, which links to nothing that is not there
	zensical build --strict
