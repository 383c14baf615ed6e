// What a small kernel asks memory for on behalf of a later one. Stands behind device.cuh.
#pragma once

// A constant matrix that a later launch reads: the first `bytes` of each row. The grid's threads share the rows, and nobody
// waits: memory would otherwise idle while a small kernel runs and the next one starts.
struct Ahead {
  const unsigned char* matrix;
  int rows, stride, bytes;  // of a row, multiples of 16; no rows: nothing is asked for
};
__device__ inline void bring_closer(const Ahead& ahead) {
  const int threads = gridDim.x * gridDim.y * blockDim.x;
  const int first = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  for (int row = first; row < ahead.rows; row += threads) {
    ask_for(ahead.matrix + static_cast<u64>(row) * ahead.stride, ahead.bytes);
  }
}
