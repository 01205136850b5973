#!/usr/bin/env bash
# Eight H100 in one node, FSDP2. Not yet run on eight GPUs.
#   train/launch/8xh100.sh gdn_mup_adamw out=runs/wide model.width=1536
# When a process dies, torchrun starts all again, and they go on from the newest checkpoint in out=DIR.
set -euo pipefail
exec torchrun --standalone --nproc_per_node=8 --max-restarts=3 -m train run --or-resume \
    "${1:?name a recipe}" device=cuda distribution.mode=fsdp "${@:2}"
