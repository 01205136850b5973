"""What every test process needs before the first import."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, which transformers does while tests are collected: too late
    # for a test module to set it.
    os.environ.setdefault("TRITON_INTERPRET", "1")
