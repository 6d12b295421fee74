# The five commands a contributor needs; CONTRIBUTING.md has more.
.PHONY: setup packages test test-all lint docs
export OMP_NUM_THREADS = 1
parallel = -n 2 --dist loadscope

setup: packages # into the active virtual environment
	python -m pip install --no-deps --no-build-isolation --editable .

packages: # exactly this torch, as any other may bring gigabytes of CUDA libraries; the others as .ci/lock wrote them
	python -m pip install --upgrade pip
	python -m pip install torch==2.13.0
	python -m pip install --require-hashes --no-deps --requirement .ci/requirements.txt

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
