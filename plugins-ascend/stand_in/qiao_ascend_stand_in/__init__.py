"""Numbers for the kernels of the stand-in CANN: the real torch_npu checks and launches, the host computes."""
