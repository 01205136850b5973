"""What others have published of their kernels at our shapes, to stand beside an estimate of ours.

All are of H200s in bfloat16, forward without kept states, and leave out the norms of q and k and
the gates, which our kernels make. Source: FlashQLA's benchmark (https://github.com/QwenLM/FlashQLA,
MIT, benchmark/benchmark_results_H200.txt, read 2026-11-25), which times FlashInfer 0.6.13, too.
"""

# shape -> whose -> milliseconds of forward and backward; None: it has none
PUBLISHED: dict[str, dict[str, tuple[float, float | None]]] = {
    "qwen3_next_1x8192": {"FlashQLA": (0.280, 0.789), "FlashInfer": (0.394, None)},
    "qwen3_next_4x8192": {"FlashQLA": (0.611, 2.978), "FlashInfer": (0.425, None)},
    "qwen3_next_1x32768": {"FlashQLA": (0.877, 2.515), "FlashInfer": (1.550, None)},
    "qwen3_5_64_4x8192": {"FlashQLA": (1.214, None), "FlashInfer": (0.827, None)},
    "qwen3_5_8_1x32768": {"FlashQLA": (0.320, None), "FlashInfer": (1.655, None)},
}


def compare(shape: str, forward: float, backward: float) -> list[str]:
    """Returns a line for each of a shape's peers, over our estimates in microseconds."""
    lines = []
    for name, times in PUBLISHED.get(shape, {}).items():
        words = [
            f"{word} {theirs:.3f} ms, {1e3 * theirs / ours:.2f} of ours"
            for word, theirs, ours in zip(
                ("forward", "backward"), times, (forward, backward), strict=True
            )
            if theirs is not None
        ]
        lines.append(
            f"{name}, published for an H200, without norms and gates: {'; '.join(words)} "
            "(estimated)"
        )
    return lines
