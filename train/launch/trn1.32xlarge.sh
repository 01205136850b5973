#!/usr/bin/env bash
# 32 NeuronCores a node, one node or several, data parallel. Not yet run on a chip.
#   one node    train/launch/trn1.32xlarge.sh gdn_mup_adamw out=runs/large
#   several     NODES=4 HEAD=10.0.0.1 train/launch/trn1.32xlarge.sh gdn_mup_adamw out=/shared/runs/large
#               on each of them; NODES=2:4 goes on with as few as two. HEAD is one of them. out=DIR and
#               data.folder=DIR are on a file system that all see.
# Compile first, with the same flags and keys, once for all nodes if NEURON_COMPILE_CACHE_URL is s3://...:
#   NEURON_CC_FLAGS="--model-type=transformer --auto-cast=none" \
#       python -m train warmup gdn_mup_adamw device=xla sample.tokens=0 \
#       batch.micro=1 evaluation.batch=8 --processes=32
# A micro-batch is a graph, and neuronx-cc refuses a graph of too many instructions: `--list` counts them.
# When a process dies, torchrun starts all again, and they go on from the newest checkpoint in out=DIR.
set -euo pipefail
export NEURON_CC_FLAGS="--model-type=transformer --auto-cast=none"
export FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1 # the network between nodes
exec torchrun --nproc_per_node=32 --nnodes="${NODES:-1}" --max-restarts=3 \
    --rdzv_id=delta-trn --rdzv_backend=c10d --rdzv_endpoint="${HEAD:-127.0.0.1}:29500" \
    -m train run --or-resume "${1:?name a recipe}" device=xla sample.tokens=0 batch.micro=1 evaluation.batch=8 "${@:2}"
