// silu(gate) * up, for batches whose linear layer doesn't do it itself. -D PARTS=1: gate and up come as a product's parts
// (parts.cuh).
#include "device.cuh"

#include "parts.cuh"

constexpr int THREADS = 256;
constexpr int EACH = PARTS ? 4 : 8;  // outputs of a thread

__device__ inline float gated(float gate, float up) { return gate / (1.0f + exp2_fast(-gate * LOG2_E)) * up; }

// y[row][i] = silu(x[row][i]) * x[row][width + i]. grid: (ceil(width / EACH / THREADS), rows); width a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul(const u16* x, u16* y, Parts parts, int width) {
  const int column = EACH * (blockIdx.x * THREADS + threadIdx.x);
  const int gate_at = min(column, width - EACH), up_at = width + gate_at;
  const int counts[2] = {PARTS ? parts.count(gate_at) : 0, PARTS ? parts.count(up_at) : 0};
  if (PARTS) allow_product();
  wait_for_previous();
  if (!PARTS) allow_next();
  if (column >= width) return;
  const u64 row = blockIdx.y;
  if (PARTS) {
    Quad sums[2];
    parts.sum<2>(row, {gate_at, up_at}, counts, sums);
    const Quad &gate = sums[0], &up = sums[1];
    u32* const target = reinterpret_cast<u32*>(y + row * width + column);
    target[0] = pack(gated(gate.v[0], up.v[0]), gated(gate.v[1], up.v[1]));
    target[1] = pack(gated(gate.v[2], up.v[2]), gated(gate.v[3], up.v[3]));
    return;
  }
  const Words gate = load_words(x + row * 2 * width + column);
  const Words up = load_words(x + row * 2 * width + width + column);
  Words result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.w[i] = pack(gated(low(gate.w[i]), low(up.w[i])), gated(high(gate.w[i]), high(up.w[i])));
  }
  *reinterpret_cast<Words*>(y + row * width + column) = result;
}
