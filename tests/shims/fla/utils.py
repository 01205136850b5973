"""What FLA's tests import from fla.utils."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"

IS_NVIDIA_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
IS_INTEL_ALCHEMIST = IS_NPU = IS_NVIDIA_BLACKWELL = IS_NVIDIA_SM100 = IS_NVIDIA_SM120 = False


def assert_close(name: str, ref: torch.Tensor, tri: torch.Tensor, ratio: float) -> None:
    """RMS of the difference below `ratio` times the RMS of `ref`; NaN fails; 1e-6 absolute passes."""
    ref, tri = ref.detach().double(), tri.detach().double()
    assert not tri.isnan().any(), f"{name} has NaN"
    if (ref - tri).abs().max().item() <= 1e-6:
        return
    found = ((ref - tri).square().mean().sqrt() / ref.square().mean().sqrt()).item()
    print(f"{name}: {found:.2e} of {ratio:.2e}")
    assert found < ratio, f"{name}: error {found:.3e}, allowed {ratio:.3e}"
