#!/usr/bin/env bash
# One Trn1 chip, two NeuronCores, data parallel. Not yet run on a chip.
#   train/launch/trn1.2xlarge.sh gdn_mup_adamw out=runs/small model.width=512
# Compile first, with the same flags and keys:
#   NEURON_CC_FLAGS="--model-type=transformer --auto-cast=none" \
#       python -m train warmup gdn_mup_adamw model.width=512 device=xla sample.tokens=0 \
#       batch.micro=2 evaluation.batch=8 --processes=2
# A micro-batch is a graph, and neuronx-cc refuses a graph of too many instructions: `--list` counts them.
# When a process dies, torchrun starts both again, and they go on from the newest checkpoint in out=DIR.
set -euo pipefail
export NEURON_CC_FLAGS="--model-type=transformer --auto-cast=none"
export NEURON_PARALLEL_COMPILE_MAX_RETRIES=1 # 32 GiB of host memory
exec torchrun --standalone --nproc_per_node=2 --max-restarts=3 -m train run --or-resume \
    "${1:?name a recipe}" device=xla sample.tokens=0 batch.micro=2 evaluation.batch=8 "${@:2}"
