"""The CUDA device: real weights, real streams, graphs. Nothing here is imported on a machine without a GPU."""
