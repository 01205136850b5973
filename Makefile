# delta-trn. Every target installs what it needs into .venv; nothing else on the machine is touched.
#
#   make train      train a small muP Gated DeltaNet on real text, and generate from it
#   make test       the test suite (a quarter of an hour on 2 cores, no accelerator); of one folder: make test ARGS=tests/models
#   make emulate    Triton's kernels compiled for sm_90 and run by an emulator of their PTX, with its checks (no GPU);
#                   for another GPU: DELTA_TRN_EMULATED=80, 86, 89 or 120 make emulate
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
#   make compile    compile every configuration of the Triton kernels for sm_90, and a part for sm_80, 86, 89 and 120,
#                   with bounds on what each needs and on the estimated time of those that matter most (no GPU, 40 minutes)
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
XLA    := .venv-xla
NEWEST := .venv/newest
EVAL   := .venv-lm-eval
TRL    := .venv-trl
FRESH  := .venv-fresh
NEURON := .venv-neuron
# the environment of AWS's image; it is read and not changed. These are the names of SDK 2.28 to 2.31 with PyTorch 2.9
KNOWN  := $(addprefix /opt/aws_neuronx_venv_,pytorch_2_9 pytorch_2_9_nxd_training pytorch_2_9_nxd_inference pytorch)
AWS    ?= $(firstword $(wildcard $(KNOWN)) $(KNOWN))
OUT    ?= runs/measured
FUZZ ?= 3000
FUZZ_SLOW ?= 50
TRITON ?= 3.9.0

.PHONY: train test emulate test-slow test-cpus test-lm-eval test-trl test-fresh test-xla test-transformers compile lint bench measure measure-trn1 \
	compile-triton fuzz neuron

train: $(READY)
	$(RUN) -m train run quickstart $(ARGS)

# Threads that wait do not spin: two processes with two threads each are more than two cores. Where they spun, parity's
# tests took over 10 minutes on two cores, and 3 where they do not.
test test-cpus: export OMP_WAIT_POLICY = PASSIVE
test test-cpus: export GOMP_SPINCOUNT = 0
test test-cpus: export KMP_BLOCKTIME = 0
# Four processes on two cores: some tests wait, for a process that ends or a lock that is freed.
# pytest exits with 5 where it finds no test: a folder may have none that runs alone.
test: SERIAL = $(shell grep -rl mark.serial tests packages)
test: $(READY)
	$(RUN) -m pytest -n 4 --dist worksteal -m "not slow and not serial" $(ARGS)
	$(RUN) -m pytest -m "serial and not slow" $(or $(ARGS),$(SERIAL)) $(if $(ARGS),|| test $$? -eq 5)

emulate: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest --emulate -n 2 -m "not slow and not serial" tests/triton_kernels $(ARGS)
	OMP_NUM_THREADS=1 $(RUN) -m pytest --emulate -n 2 -m "not slow and not serial" -k triton $(ARGS) tests/parity/test_parity.py

test-slow: $(READY)
	$(RUN) -m pytest -m slow --timeout=7200

# Each level of this CPU, with one thread and with two: ATEN_CPU_CAPABILITY chooses PyTorch's own kernels, the others
# choose those of the libraries that multiply for it and for NumPy. NumPy's products stand for other CPUs.
test-cpus: $(READY)
	for level in $$($(RUN) -c 'import torch; sets = ["default", "avx2", "avx512"]; own = torch.backends.cpu.get_cpu_capability().lower(); print(*sets[: sets.index(own) + 1 if own in sets else 1])'); do \
		case $$level in \
			default) products="MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem";; \
			avx2) products="MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell";; \
			avx512) products="";; \
		esac; \
		for threads in 1 2; do \
			echo "ATEN_CPU_CAPABILITY=$$level $$products OMP_NUM_THREADS=$$threads"; \
			env ATEN_CPU_CAPABILITY=$$level $$products OMP_NUM_THREADS=$$threads \
				$(RUN) -m pytest -n 2 -m "not slow and not serial" || exit 1; \
		done; \
	done
	$(RUN) -m pytest -n 2 -m "not slow and not serial" --other-products

test-lm-eval: $(EVAL)/.ready
	OMP_NUM_THREADS=1 $(EVAL)/bin/python -m pytest tests/models/ecosystem/test_lm_eval.py --timeout=600

test-trl: $(TRL)/.ready
	OMP_NUM_THREADS=1 $(TRL)/bin/python -m pytest tests/models/ecosystem/test_trl.py --timeout=600

# The environment goes afterwards: the next one has the wheel and the packages of its own day.
test-fresh: $(FRESH)/.ready
	status=0; $(FRESH)/bin/python tests/project/fresh_wheel.py || status=$$?; rm -rf $(FRESH); exit $$status

# once with functionalization, as a model of transformers may need it, and once without, torch-neuronx's default
test-xla: $(XLA)/.ready
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 XLA_DISABLE_FUNCTIONALIZATION=0 \
		$(XLA)/bin/python -m pytest tests/train/test_xla.py --timeout=900
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 XLA_DISABLE_FUNCTIONALIZATION=1 \
		$(XLA)/bin/python -m pytest tests/train/test_xla.py --timeout=900

neuron: $(NEURON)/.ready
	@$(NEURON)/bin/python -c '$(VERSIONS)'

compile-triton: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=$(VENV)/triton-$(TRITON) $(RUN) -m triton_kernels.compile_only --quick --architecture 90 100

test-transformers: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(NEWEST) transformers
	PYTHONPATH=$(NEWEST) $(RUN) -m pytest -rs -m "not slow" tests/models/ecosystem/test_patching.py tests/models/ecosystem/test_packing.py \
		tests/models/ecosystem/test_classification.py tests/models/test_generation.py tests/train/test_generate.py tests/backends/test_bench.py

compile: $(READY)
	$(RUN) -m triton_kernels.compile_only
	$(RUN) -m tools.estimate --check
	$(RUN) -m triton_kernels.compile_only --quick --architecture 80 86 89 120

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
measure-trn1: $(if $(DRY),$(READY),$(NEURON)/.ready)
	mkdir -p $(OUT)
	. $(if $(DRY),$(VENV),$(NEURON))/bin/activate && . train/launch/neuron_environment.sh && \
		python -m tools.first_hour_trn1 $(if $(DRY),--dry) --json $(OUT)/trn1.jsonl

# torch comes first and alone: a CUDA build brings the triton that it was built with. A CPU build brings none, and
# then 3.7.1 is installed, which belongs to torch 2.13.
$(READY): pyproject.toml packages/nki-simulator/pyproject.toml .ci/constraints.txt
	@echo "installing PyTorch and the packages beside it into $(VENV): 2 to 6 GB, several minutes, in which pip says nothing"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "delta-trn needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(RUN) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' || \
		$(RUN) -m pip install --quiet --disable-pip-version-check triton==3.7.1
	$(RUN) -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e ./packages/nki-simulator -e '.[dev]'
	touch $@

# torch 2.9 is the last one that torch_xla supports, and so Trn1. torch_xla does not require any torch itself.
$(XLA)/.ready: pyproject.toml packages/nki-simulator/pyproject.toml .ci/constraints.txt
	@echo "installing torch-xla and its PyTorch into $(XLA): 8 GB, several minutes, in which pip says nothing"
	test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.9.0 torch-xla==2.9.0
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e ./packages/nki-simulator -e . pytest pytest-timeout
	touch $@

# AWS's packages come from AWS's environment. What training needs beside them, or needs newer, is installed here, where
# it hides AWS's and replaces nothing. What runs in the process together with the compiler stays AWS's version.
$(NEURON)/.ready: pyproject.toml packages/nki-simulator/pyproject.toml
	@echo "installing what training needs beside AWS's environment into $(NEURON): 1 GB, some minutes"
	@echo "environments of AWS here: $(or $(wildcard /opt/aws_neuronx_venv_*),none); taken: $(AWS)"
	@test -x $(AWS)/bin/python || { echo "$(AWS) is no environment. Images after SDK 2.31 hold none with PyTorch 2.9:" \
		"docs/trainium.md says which image to take. Or name an environment: make neuron AWS=DIR" >&2; exit 1; }
	test -x $(NEURON)/bin/python || { $(AWS)/bin/python -m venv $(NEURON) && \
		echo 'PATH="$$PATH:$(abspath $(AWS))/bin"' >> $(NEURON)/bin/activate; }
	$(AWS)/bin/python -c '$(PACKAGES)' > $$($(NEURON)/bin/python -c '$(PACKAGES)')/aws.pth
	$(AWS)/bin/python -m pip list --format=freeze --disable-pip-version-check | \
		grep -iE '^(torch|libneuron|neuron|nki|numpy|ml[_-]dtypes|protobuf)' > $(NEURON)/constraints.txt
	$(NEURON)/bin/python -m pip install --quiet --disable-pip-version-check -c $(NEURON)/constraints.txt -e ./packages/nki-simulator -e . pytest
	touch $@

# lm-eval brings 40 packages, so it has an environment of its own, which finds torch and the rest in .venv. So has trl.
# Both see the packages of .venv behind their own: `addsitedir` reads the .pth files there too, so a process in any
# folder finds delta_trn.
VERSIONS := import importlib.metadata as m; have = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in reversed(list(m.distributions()))}; \
	[print(f"{n:20}{have.get(n, chr(45))}") for n in ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "nki", "neuronx-distributed", "transformers")]
PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
BEHIND   := import sysconfig; path = sysconfig.get_path("purelib"); print(f"import site; site.addsitedir({path!r})")
$(EVAL)/.ready: $(READY) .ci/lm_eval.txt
	@echo "installing lm-eval into $(EVAL): 0.3 GB, a minute or two"
	test -x $(EVAL)/bin/python || $(PYTHON) -m venv $(EVAL)
	$(RUN) -c '$(BEHIND)' > $$($(EVAL)/bin/python -c '$(PACKAGES)')/venv.pth
	$(EVAL)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c .ci/constraints.txt -c .ci/lm_eval.txt lm_eval==0.4.13
	touch $@

$(TRL)/.ready: $(READY) .ci/trl.txt
	@echo "installing TRL into $(TRL): 10 MB, less than a minute"
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(RUN) -c '$(BEHIND)' > $$($(TRL)/bin/python -c '$(PACKAGES)')/venv.pth
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r .ci/trl.txt
	touch $@

# Without constraints, as a user's own.
$(FRESH)/.ready:
	@echo "installing the wheel and the newest packages into $(FRESH): 6 GB, several minutes, in which pip says nothing"
	rm -rf $(FRESH)
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(FRESH)/wheel .
	$(FRESH)/bin/python -m pip install --quiet --disable-pip-version-check $(FRESH)/wheel/*.whl
	touch $@
