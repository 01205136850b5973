#!/usr/bin/env bash
# One Trn1 chip, two NeuronCores, data parallel. Not yet run on a chip.
#   train/launch/trn1.2xlarge.sh warmup gdn_mup_adamw out=runs/small model.width=512    compiles: first
#   train/launch/trn1.2xlarge.sh gdn_mup_adamw out=runs/small model.width=512           trains
# A micro-batch is a graph, and neuronx-cc refuses one of too many instructions: `warmup ... --list` counts.
# When a process dies, torchrun starts both again, and they go on from the newest checkpoint in out=DIR.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/neuron_environment.sh"
# 32 GiB of host memory: frameworks/torch/torch-neuronx/api-reference-guide/training/torch-neuron-envvars.rst
export NEURON_PARALLEL_COMPILE_MAX_RETRIES=1
refuse_without_barrier
# One graph at a time: the compiler has taken 30 to 40 GB for one that is unrolled (aws-neuron-sdk issue 1374)
compile=(neuron_parallel_compile --num_parallel 1)
# Recording a micro-batch takes the host as long for three sequences as for one, and then less time than their
# kernels take. A larger graph takes more memory to compile.
keys=(device=xla sample.tokens=0 batch.micro=3 evaluation.batch=5)
# not torchrun itself: that of AWS's environment would start AWS's python
launch=(python -m torch.distributed.run --standalone --nproc_per_node=2 --max-restarts=3)
if [ "${1:?name a recipe}" = warmup ]; then
    warm_up "${2:?name a recipe}" "${keys[@]}" "${@:3}" --processes=2
fi
exec "${launch[@]}" -m train run --or-resume "$1" "${keys[@]}" "${@:2}"
