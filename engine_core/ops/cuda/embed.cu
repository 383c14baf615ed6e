// The residual stream's first rows, fed from the tokens that the last step drew.
#include "device.cuh"

constexpr int THREADS = 128;

// y[row] = table[last_token[slots[row]]]; zero for a row of slot -1. grid: (ceil(width / 8 / THREADS), rows).
extern "C" __global__ void __launch_bounds__(THREADS)
    embed_last(const u16* table, const int* last_token, const int* slots, u16* y, int width) {
  wait_for_previous();
  allow_next();
  const int column = 8 * (blockIdx.x * THREADS + threadIdx.x);
  if (column >= width) return;
  const int slot = slots[blockIdx.y];
  Words value{{0, 0, 0, 0}};
  if (slot >= 0) value = load_words(table + static_cast<u64>(last_token[slot]) * width + column);
  *reinterpret_cast<Words*>(y + static_cast<u64>(blockIdx.y) * width + column) = value;
}
