"""CUDA kernels of the decode path, for Hopper (compute capability 9.0) and bf16.

Owns the kernels' sources (*.cu), their run-time compilation and the Python that sizes and launches them. Every launch
can be captured in a CUDA graph, reads what changes from step to step in device memory, and has a grid fixed by the
batch bucket. Refuses to synchronize, to allocate while launching, and to know requests or plans.

No module here is imported on a machine without a GPU, save `splits`, which is plain arithmetic.
"""
