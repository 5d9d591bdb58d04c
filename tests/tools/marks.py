"""Marks of tests that some versions of torch cannot run."""

import pytest
import torch

needs_fsdp_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch does not run on CPU"
)
needs_masks_exported = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="torch.export of old torch refuses attention masks of transformers"
)
needs_graphs = pytest.mark.skipif(torch.__version__ < "2.9", reason="stages are captured from torch 2.9 on")
