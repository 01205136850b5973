#!/usr/bin/env bash
# 32 NeuronCores a node, one node or several, data parallel. Not yet run on a chip.
#   one node    train/launch/trn1.32xlarge.sh warmup gdn_mup_adamw out=runs/large    compiles: first
#               train/launch/trn1.32xlarge.sh gdn_mup_adamw out=runs/large           trains
#   several     NODES=4 HEAD=10.0.0.1 train/launch/trn1.32xlarge.sh gdn_mup_adamw out=/shared/runs/large
#               on each of them, and `warmup` before it too; NODES=2:4 goes on with as few as two. HEAD is one
#               of them. out=DIR and data.folder=DIR are on a file system that all see. They share what is
#               compiled if NEURON_COMPILE_CACHE_URL is s3://...
# A micro-batch is a graph, and neuronx-cc refuses one of too many instructions: `warmup ... --list` counts.
# When a process dies, torchrun starts all again, and they go on from the newest checkpoint in out=DIR.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/neuron_environment.sh"
# The network between nodes: frameworks/torch/torch-neuronx/setup-trn1-multi-node-execution.rst. A kernel
# before 5.15 (Amazon Linux 2) needs FI_EFA_FORK_SAFE=1 as well: neuron-runtime/nrt-troubleshoot.rst
export FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1
# Every graph with a collective waits for all processes. With 32 of them the runtime's own barrier takes 5.1 ms, and
# the hardware's 2.8, with the same bits (measured by foxl-ai/kiln on trn1.32xlarge, SDK 2.32). On Trn2 it is slower.
export NEURON_RT_ENABLE_HW_EXECUTION_BARRIER="${NEURON_RT_ENABLE_HW_EXECUTION_BARRIER:-1}"
refuse_without_barrier
# Recording a micro-batch takes the host as long for five sequences as for one; 32 processes share the host.
keys=(device=xla sample.tokens=0 batch.micro=5 evaluation.batch=5)
# not torchrun itself: that of AWS's environment would start AWS's python
launch=(python -m torch.distributed.run --nproc_per_node=32 --nnodes="${NODES:-1}" --max-restarts=3
    --rdzv_id=delta-trn --rdzv_backend=c10d --rdzv_endpoint="${HEAD:-127.0.0.1}:29500")
if [ "${1:?name a recipe}" = warmup ]; then
    warm_up "${2:?name a recipe}" "${keys[@]}" "${@:3}" --processes=32
fi
exec "${launch[@]}" -m train run --or-resume "$1" "${keys[@]}" "${@:2}"
