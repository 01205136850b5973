# delta-trn. Every target installs what it needs into .venv; nothing else on the machine is touched.
# How long each takes stands in docs/backends-and-parity.md, under Testing.
#
#   make train      train a small muP Gated DeltaNet on real text, and generate from it
#   make test       the test suite, without an accelerator; of one folder: make test ARGS=tests/models
#   make emulate    Triton's kernels compiled for sm_90 and run by an emulator of their PTX, with its checks (no GPU);
#                   for another GPU: DELTA_TRN_EMULATED=80, 86, 89 or 120 make emulate; PART=1/3 make emulate: a third
#   make lint       ruff and pyright
#   make bench      time the operations, after their parity
#   make measure    on a GPU: what a launch needs, the headline times beside flash-linear-attention, parity, whole steps;
#                   what fails is passed over; writes its lines to OUT. DRY=1 runs every step without a GPU
#   make measure-trn1  on a Trn1: the first hour, stage by stage, each with what it decides;
#                   DRY=1 runs every stage without a chip; writes its lines to OUT
#   make test-slow  the checks that take hours
#   make fuzz       new random cases on chunked, the simulator and in Triton's interpreter: FUZZ (3000) and FUZZ_SLOW
#                   (50) of each of 8 operations; what was red before comes first
#   make test-cpus  the test suite on every instruction set of this CPU, with one and two threads, and with other products
#   make compile    compile every configuration of the Triton kernels for sm_90, and some for sm_80, 86, 89 and 120,
#                   with bounds on what each needs and on the estimated time of those that matter most (no GPU);
#                   PART=2/4 make compile: the second of four parts
#   make compile-triton TRITON=3.9.0  a part of it with another Triton, beside the installed one
#   make test-lm-eval  lm-eval on an exported model: the command of docs/export.md (0.3 GB beside .venv)
#   make test-trl   TRL and PEFT on our models and patched ones: the script of docs/fine-tuning.md (10 MB beside .venv)
#   make test-fresh the built wheel with the newest release of all that it needs, as pip installs it today (6 GB)
#   make test-xla   train on torch-xla's CPU device, with torch 2.9 in an environment of its own (8 GB)
#   make neuron     on a Trn1: an environment of our own over AWS's, which stays as it is
#   make test-transformers  our models and patched ones with the newest transformers, beside the installed one

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
NEWEST := .venv/newest
# the environment of AWS's image, where it is none of those that tools/environments.py knows
AWS    ?=
export AWS
OUT    ?= runs/measured
FUZZ ?= 3000
FUZZ_SLOW ?= 50
TRITON ?= 3.9.0
# one of several parts that are dealt out in turn, as I/PARTS
PART   ?= 1/1

.PHONY: train test emulate test-slow test-cpus test-lm-eval test-trl test-fresh test-xla test-transformers compile lint bench measure measure-trn1 \
	compile-triton fuzz neuron

train: $(READY)
	$(RUN) -m train run quickstart $(ARGS)

# Threads that wait do not spin: two processes with two threads each are more than two cores. Where they spun, parity's
# tests took over 10 minutes on two cores, and 3 where they do not.
test test-cpus: export OMP_WAIT_POLICY = PASSIVE
test test-cpus: export GOMP_SPINCOUNT = 0
test test-cpus: export KMP_BLOCKTIME = 0
# Three processes on two cores: some tests wait, for a process that ends or a lock that is freed. A fourth would import
# and collect everything once more, which takes longer than what it saves.
# pytest exits with 5 where it finds no test: a folder may have none that runs alone.
test: SERIAL = $(shell grep -rl mark.serial tests packages)
test: $(READY)
	$(RUN) -m pytest -n 3 --dist worksteal -m "not slow and not serial" $(ARGS)
	$(RUN) -m pytest -m "serial and not slow" $(or $(ARGS),$(SERIAL)) $(if $(ARGS),|| test $$? -eq 5)

# Both run, also where the first finds something.
emulate: EMULATED = OMP_NUM_THREADS=1 $(RUN) -m pytest --emulate -n 2 -m "not slow and not serial" --part $(PART) $(ARGS)
emulate: $(READY)
	status=0; $(EMULATED) tests/triton_kernels || status=1; \
		$(EMULATED) -k triton tests/parity/test_parity.py || status=1; exit $$status

test-slow: $(READY)
	$(RUN) -m pytest -m slow --timeout=7200

test-cpus: $(READY)
	$(RUN) -m tools.cpus

test-lm-eval: $(VENV)-lm-eval/.ready
	OMP_NUM_THREADS=1 $(VENV)-lm-eval/bin/python -m pytest tests/models/ecosystem/test_lm_eval.py --timeout=600

test-trl: $(VENV)-trl/.ready
	OMP_NUM_THREADS=1 $(VENV)-trl/bin/python -m pytest tests/models/ecosystem/test_trl.py --timeout=600

# The environment goes afterwards: the next one has the wheel and the packages of its own day.
test-fresh: $(VENV)-fresh/.ready
	status=0; $(VENV)-fresh/bin/python tests/project/fresh_wheel.py || status=$$?; rm -rf $(VENV)-fresh; exit $$status

# once with functionalization, as a model of transformers may need it, and once without, torch-neuronx's default
test-xla: $(VENV)-xla/.ready
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 XLA_DISABLE_FUNCTIONALIZATION=0 \
		$(VENV)-xla/bin/python -m pytest tests/train/test_xla.py --timeout=900
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 XLA_DISABLE_FUNCTIONALIZATION=1 \
		$(VENV)-xla/bin/python -m pytest tests/train/test_xla.py --timeout=900

neuron: $(VENV)-neuron/.ready
	@$(VENV)-neuron/bin/python tools/environments.py --versions

compile-triton: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=$(VENV)/triton-$(TRITON) $(RUN) -m triton_kernels.compile_only --quick --architecture 90 100

test-transformers: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(NEWEST) transformers
	PYTHONPATH=$(NEWEST) $(RUN) -m pytest -rs -m "not slow" tests/models/ecosystem/test_patching.py tests/models/ecosystem/test_packing.py \
		tests/models/ecosystem/test_classification.py tests/models/test_generation.py tests/train/test_generate.py tests/backends/test_bench.py

compile: $(READY)
	$(RUN) -m triton_kernels.compile_only --part $(PART)
	$(RUN) -m tools.estimate --check
	$(RUN) -m triton_kernels.compile_only --part $(PART) --quick --architecture 80 86 89 120

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

# All three run, also where one finds something.
fuzz: $(READY)
	status=0; for backend in chunked nki-simulator triton; do \
		cases=$(FUZZ_SLOW); if [ $$backend = chunked ]; then cases=$(FUZZ); fi; \
		$(RUN) -m pytest -n 2 --timeout=0 tests/parity/test_properties.py -k test_every_property \
			--backend $$backend --fuzz $$cases $(ARGS) || status=1; \
	done; exit $$status

bench: $(READY)
	$(RUN) -m backends.bench $(ARGS)

# What the GPU is compared with is installed beside it; without it, and without a network, the rest runs.
measure: $(READY)
	$(if $(DRY),,$(RUN) -c 'import fla' 2>/dev/null || $(RUN) -m pip install --quiet --disable-pip-version-check --no-deps flash-linear-attention fla-core einops || \
		echo "flash-linear-attention could not be installed: nothing is timed beside it")
	$(RUN) -m tools.measure_gpu --out $(OUT) $(if $(DRY),--dry tests.support.emulated) $(ARGS)

# With DRY=1 in .venv, without a chip. No environment need be active: this one has AWS's programs on its path.
measure-trn1: SHELL = /bin/bash
measure-trn1: $(if $(DRY),$(READY),$(VENV)-neuron/.ready)
	mkdir -p $(OUT)
	. $(if $(DRY),$(VENV),$(VENV)-neuron)/bin/activate && . train/launch/neuron_environment.sh && \
		python -m tools.first_hour_trn1 $(if $(DRY),--dry) --json $(OUT)/trn1.jsonl

# Each environment is a row of tools/environments.py. Here stands what it is made again after a change of.
SOURCES := pyproject.toml packages/nki-simulator/pyproject.toml
$(READY) $(VENV)-xla/.ready: $(SOURCES) .ci/constraints.txt
$(VENV)-lm-eval/.ready: $(READY) .ci/lm_eval.txt
$(VENV)-trl/.ready: $(READY) .ci/trl.txt
$(VENV)-neuron/.ready: $(SOURCES)
$(VENV)-fresh/.ready:
%/.ready:
	$(PYTHON) tools/environments.py $*
	touch $@
