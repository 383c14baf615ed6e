// silu(gate) * up, for batches whose linear layer doesn't do it itself.
#include "device.cuh"

constexpr int THREADS = 256;

__device__ inline float gated(float gate, float up) { return gate / (1.0f + exp2_fast(-gate * LOG2_E)) * up; }

// y[row][i] = silu(x[row][i]) * x[row][width + i]. grid: (ceil(width / 8 / THREADS), rows); width a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul(const u16* x, u16* y, int width) {
  wait_for_previous();
  allow_next();
  const int column = 8 * (blockIdx.x * THREADS + threadIdx.x);
  if (column >= width) return;
  const u64 row = blockIdx.y;
  const Words gate = load_words(x + row * 2 * width + column);
  const Words up = load_words(x + row * 2 * width + width + column);
  Words result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.w[i] = pack(gated(low(gate.w[i]), low(up.w[i])), gated(high(gate.w[i]), high(up.w[i])));
  }
  *reinterpret_cast<Words*>(y + row * width + column) = result;
}
