# Each target does its own set-up: see scripts/setup_env.py and docs/setup.md.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Where the files of a run go: server logs, test reports.
OUT ?= out
# Tests that start no server take a process per core, each some 3 GB with the ranks that it forks; a file's tests stay
# together. The others have servers, which keep the cores busy, or clocks: one after the other.
SEVERAL := -n logical --maxprocesses 4 --dist loadfile
UNIT := tests/unit tests/harness
SERVERS := tests/faults tests/accuracy tests/serving
PYTEST = SGLANG_HETERO_TEST_LOGS=$(abspath $(OUT))/servers $(BIN)/python -m pytest
# A failed test (status 1) does not keep the rest from running; anything else does.
define BOTH
@failed=0; \
$(PYTEST) $(SEVERAL) $(1) $(UNIT) || failed=$$?; \
[ $$failed -le 1 ] || exit $$failed; \
$(PYTEST) $(1) $(SERVERS) || failed=$$?; \
exit $$failed
endef

.PHONY: help setup ascend-env demo pair-0.5.22 test test-full unit mutants faults patches lint format bench bench-small \
        failover clean

help:
	@echo "make setup   make or repair .venv, as all of these but clean do first"
	@echo "make ascend-env"
	@echo "             make or repair .venv-ascend, Triton's compiler and MemFabric for NPUs, as test and unit do first"
	@echo "make demo    P2/D1 on the real SGLang, checked against the undivided server"
	@echo "make pair-0.5.22"
	@echo "             doctor and demo on SGLang 0.5.22, in .venv-0.5.22; MTP depth 0 and 3, and decode compares every byte"
	@echo "make test    the tests (about 50 minutes on 2 cores)"
	@echo "make test-full"
	@echo "             all of them, with every pair of TP sizes on real servers (an estimated two hours)"
	@echo "make unit    the tests that start no server (about 23 minutes)"
	@echo "make mutants put in about a hundred faults one by one; the tests must notice each; ends caught N/N"
	@echo "make faults  kill, stop, cut and confuse running pairs and servers; ends N faults, 0 wrong, 0 leaked, 0 hung"
	@echo "make patches the changes to SGLang of patches/, on a copy of its source; ends patches N/N (a minute)"
	@echo "make lint    ruff format, ruff check, mypy"
	@echo "make format  ruff format, ruff check --fix"
	@echo "make bench   a 16,384-token prefill on the CPU reference platform, to take at most 60 s, and the merge"
	@echo "             operations beside a memcpy of the same bytes"
	@echo "make bench-small"
	@echo "             the five topologies under load, scaled down to about 20 minutes; writes a report, can be resumed"
	@echo "make failover"
	@echo "             a prefill server and etcd are killed under load on real servers, about 10 minutes; writes a report"
	@echo "make clean   remove .venv, .venv-ascend, .venv-0.5.22 and $(OUT)/"

setup:
	@command -v "$(PYTHON)" >/dev/null || { echo >&2 \
	  "setup: there is no Python at '$(PYTHON)': install Python 3.11, or name it with make setup PYTHON=/path/to/python3.11"; \
	  exit 1; }
	@exec "$(PYTHON)" scripts/setup_env.py

ascend-env: setup
	@exec "$(PYTHON)" scripts/setup_ascend_env.py

demo: setup
	@$(BIN)/sglang-hetero demo --log-dir $(OUT)/demo

OLDER := .venv-0.5.22/bin/python -m sglang_hetero
# Decode fails a request where what has arrived is not what was sent.
VERIFIED := --decode-env SGLANG_HETERO_VERIFY=1 --log-dir $(OUT)/pair-0.5.22

pair-0.5.22: setup
	@"$(PYTHON)" scripts/setup_release_env.py 0.5.22
	@$(OLDER) doctor
	@$(OLDER) demo --mtp 0 $(VERIFIED)/mtp0
	@$(OLDER) demo --mtp 3 $(VERIFIED)/mtp3

test: setup ascend-env lint
	$(call BOTH,--durations=5 -m "not full")

test-full: setup ascend-env lint
	$(call BOTH,--durations=20)

unit: setup ascend-env
	@$(BIN)/python -m pytest $(SEVERAL) $(UNIT)

mutants: setup
	@$(BIN)/python -m tests.mutants

faults: setup
	@OUT=$(abspath $(OUT)) $(BIN)/python -m tests.faults

patches: setup
	@PYTHON=$(BIN)/python patches/check

lint: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup
	@$(BIN)/python -m bench_serving.prefill_cpu --limit 60
	@$(BIN)/python -m bench_serving.merge
	@$(BIN)/python -m bench_serving.handoff

bench-small: setup
	@$(BIN)/python -m bench_serving.matrix --scale small --out $(OUT)/matrix-small

failover: setup
	@$(BIN)/python -m bench_serving.failover --out $(OUT)/failover --log-dir $(OUT)/failover/logs

clean:
	rm -rf .venv .venv-ascend .venv-0.5.22 .venv.lock $(OUT)
