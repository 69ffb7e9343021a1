"""The kernels: plain pointers and masks, no block pointers, no descriptors, no autotuning, no device libraries.

Values are widened to float32 as soon as they are loaded wherever they are computed with: Triton's interpreter gets sums
and products of bfloat16 values wrong. ``WIDE`` says the same of the operands of products.
"""
