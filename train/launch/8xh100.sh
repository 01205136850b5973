#!/usr/bin/env bash
# Eight H100 in one node, FSDP2. Not yet run on eight GPUs.
#   train/launch/8xh100.sh gdn_mup_adamw model.width=1536
set -euo pipefail
exec torchrun --standalone --nproc_per_node=8 -m train run "${1:?name a recipe}" \
    device=cuda distribution.mode=fsdp "${@:2}"
