# The same commands for a person and for CI. Everything runs in .venv, which `make install` fills from constraints.txt.
PYTHON ?= python3.11
BIN := .venv/bin
PROTOS := $(wildcard protos/mammoth_wire/v1/*.proto)
STAMP := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK = 1

HARNESS := PYTHONPATH=tests/cluster $(BIN)/python -m harness

.PHONY: install protos format check test demo bench bench-tuner bench-twin bench-ar bench-ar-quality bench-dit bench-dit-quality eval-checkpoint images test-cluster test-node

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Generated modules are committed beside their schema; `check` fails when they differ.
protos: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I protos --plugin=$(BIN)/protoc-gen-mypy --plugin=$(BIN)/protoc-gen-mypy_grpc \
	    --python_out=protos --grpc_python_out=protos --mypy_out=quiet:protos --mypy_grpc_out=quiet:protos $(PROTOS)

format: $(STAMP)
	$(BIN)/ruff format --quiet
	$(BIN)/ruff check --fix

check: protos
	git diff --exit-code --stat -- protos
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --quiet tests/test_layout.py

test: export OMP_NUM_THREADS ?= 1
test: $(STAMP)
	$(BIN)/pytest --quiet -n 2 --dist worksteal

demo: $(STAMP)
	$(BIN)/python -m mammoth_client.demo

bench: $(STAMP)
	$(BIN)/python -m bench.handover
	$(BIN)/python -m bench.overhead

# Tuner and planner on seeded traces in the twin (three minutes on one core); the twin, and the tuner, on the services (22 minutes).
bench-tuner: $(STAMP)
	$(BIN)/python -m bench.tuner --docs docs

bench-twin: $(STAMP)
	$(BIN)/python -m bench.twin --docs docs
	$(BIN)/python -m bench.tuner_services --docs docs

# Needs a GPU; writes bench/results/dit_h200.json and brings it into docs/performance.md.
bench-dit: $(STAMP)
	$(BIN)/python -m bench.dit --profile
	$(BIN)/python -m bench.dit_plots

# Needs a GPU; writes bench/results/ar_h200.json and brings it into docs/performance-ar.md.
bench-ar: $(STAMP)
	$(BIN)/python -m bench.ar
	$(BIN)/python -m bench.ar_plots

# What fp8 and the step cache cost in quality, on the checkpoint that draws; on the CPU.
bench-dit-quality: $(STAMP)
	$(BIN)/python -m bench.dit_quality

# What fp8 weights cost in quality, on the checkpoint that draws; on the CPU.
bench-ar-quality: $(STAMP)
	$(BIN)/python -m bench.ar_quality

eval-checkpoint: $(STAMP)
	$(BIN)/python -m bench.eval_checkpoint

images:
	.ci/images.sh

# A real Kubernetes: the one of MAMMOTH_TEST_KUBECONFIG, or one that the harness builds once (about 10 minutes on two
# cores) and keeps in ~/.cache/mammoth. Exit code 3 of the harness: this machine cannot carry one; the tests then skip, or
# fail with MAMMOTH_TEST_CLUSTER=required. They wait more than they work: each of three workers has a control plane, one a node.
test-cluster: $(STAMP)
	$(HARNESS) build || test $$? = 3
	$(HARNESS) images light || test $$? = 3
	$(BIN)/pytest --quiet -rs -m cluster -n 3 --dist loadgroup

# The node tier again, with the real images, which are built first.
test-node: $(STAMP)
	$(HARNESS) build
	$(HARNESS) images real
	MAMMOTH_TEST_IMAGES=real $(BIN)/pytest --quiet -rs -m node
