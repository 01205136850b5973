#!/usr/bin/env bash
# 32 NeuronCores a node, one node or several, data parallel. Not yet run on a chip.
#   one node    train/launch/trn1.32xlarge.sh gdn_mup_adamw
#   several     NODES=4 NODE=0 HEAD=10.0.0.1 train/launch/trn1.32xlarge.sh gdn_mup_adamw, NODE=1.. on the others;
#               out=DIR and data.folder=DIR are on a file system that all nodes see
set -euo pipefail
export NEURON_CC_FLAGS="--model-type=transformer --auto-cast=none"
export FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1 # the network between nodes
exec torchrun --nproc_per_node=32 --nnodes="${NODES:-1}" --node_rank="${NODE:-0}" \
    --master_addr="${HEAD:-127.0.0.1}" --master_port=29500 \
    -m train run "${1:?name a recipe}" device=xla sample.tokens=0 "${@:2}"
