# What AWS documents for training on Trn1, for the launch scripts beside this file, which source it.
# A path is that of a page in github.com/aws-neuron/aws-neuron-sdk at v2.28.1, unless it names a repository.
# What is set before has precedence, but for the two flags of the compiler.

# The compiler expects a transformer, and casts nothing itself: torch.autocast does, as AWS describes it.
# compiler/neuronx-cc/api-reference-guide/index.rst,
# frameworks/torch/torch-neuronx/programming-guide/training/pytorch-neuron-programming-guide.rst
export NEURON_CC_FLAGS="--model-type=transformer --auto-cast=none ${NEURON_CC_FLAGS:-}"

# They would make bfloat16 of all float32, the weights included, and are deprecated:
# about-neuron/appnotes/torch-neuronx/migration-from-xla-downcast-bf16.rst
unset XLA_USE_BF16 XLA_DOWNCAST_BF16

# Round to nearest even: weights are float32 here, and parity is measured with it. Stochastic rounding is for
# weights in bfloat16: about-neuron/arch/neuron-features/rounding-modes.rst
export NEURON_RT_STOCHASTIC_ROUNDING_EN="${NEURON_RT_STOCHASTIC_ROUNDING_EN:-0}"

# torch-neuronx's own default. With functionalization, 0, AWS measured 15% more time without aliasing of buffers, and
# training with ZeRO-1 has diverged (neuronx-distributed issue 26). Without it torch.split with a list of sizes
# returns wrong elements: our own models do not call it, a model of transformers that does needs 0.
# about-neuron/appnotes/torch-neuronx/introducing-pytorch-2-9.rst
export XLA_DISABLE_FUNCTIONALIZATION="${XLA_DISABLE_FUNCTIONALIZATION:-1}"

# Up to three graphs are queued while the host records the next. AWS measured about 12% less time; more than
# three may take too much memory: neuron-runtime/nrt-configurable-parameters.rst
export NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS="${NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS:-3}"

# glibc's arenas would fill the host's memory: "Memory leaking in glibc" of
# _backup-rn/torch/torch-neuronx/index.rst.
# 64 is in aws-neuron/neuronx-distributed: examples/training/llama/tp_zero1_llama_hf_pretrain/
export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-64}"

# MB of gradients for each all-reduce; 50 is AWS's default:
# frameworks/torch/torch-neuronx/api-reference-guide/training/torch-neuron-envvars.rst
export ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB="${ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB:-50}"

# Without the barrier between processes a collective may read what another process has not written yet: wrong numbers
# without a word, or a wait without end (measured by foxl-ai/kiln). Two public servers of models turn it off.
refuse_without_barrier() {
    if [ "${NEURON_RT_DISABLE_EXECUTION_BARRIER:-0}" != 0 ]; then
        echo "NEURON_RT_DISABLE_EXECUTION_BARRIER=$NEURON_RT_DISABLE_EXECUTION_BARRIER makes collectives wrong," \
            "silently: expected 0 or nothing; unset it" >&2
        exit 2
    fi
}

# How graphs are compiled ahead: as many at once as AWS's program likes.
compile=(neuron_parallel_compile)

# Compiles all graphs ahead, and goes through them again, which shows that all come from the cache. A graph has
# the number of all processes in it, so that it is `launch` which starts them, as in training.
warm_up() {
    case " $* " in *" --list "*) exec python -m train warmup "$@" ;; esac
    "${compile[@]}" "${launch[@]}" -m train warmup "$@"
    exec "${launch[@]}" -m train warmup "$@"
}
