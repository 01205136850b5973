"""What backends.machine calls of torch_xla 2.9, on CPU tensors and torch.distributed's gloo.

Names, arguments, their order and defaults are the package's own, which tests/support/published.py
has with their sources. Nothing is lazy here: what is recorded in a graph there is done at once.
"""


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Ends a graph, of which there is none here."""
