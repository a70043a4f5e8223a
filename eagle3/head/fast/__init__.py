"""The head's training at the speed of its matrix products. Each part stands in for a plain one and equals it.

attention.py: flash_attention.py, on a kernel of flash_kernels.py or triton_flash.py; own_keys.py for later steps' keys
layer.py, draft_head.py: fused_layer.py on fused_weights.py; elementwise.py is what it does between products,
  products.py bf16 or float8
loss.py: chunked_loss.py

A module named …_kernel(s), or triton_flash_…, holds the Triton of the module that it is named after. That one has the
reference in plain PyTorch, and takes it where Triton does not run.
"""
