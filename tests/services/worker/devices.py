"""Names the device on which a test of the torch engine computes: a GPU or the CPU."""

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def device_of(way: str) -> str:
    return "cuda" if way == "on CUDA" else "cpu"
