"""Where there is no CUDA device, Triton's kernels run in its interpreter. Triton decides when it is imported, which
Transformers does through PyTorch: so this stands before everything else.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
