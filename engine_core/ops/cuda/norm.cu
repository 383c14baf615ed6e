// Residual add and RMSNorm of whole rows in one pass. -D WIDTH: the hidden size, a multiple of 8.
#include "device.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

__device__ inline float block_sum(float value) {
  __shared__ float sums[WARPS];
  const float of_warp = sum_lanes<1, 16>(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = of_warp;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) total += sums[warp];
  return total;
}

// residual += x (skipped if x is null), then y = RMSNorm(residual) * weight. One block a row; y may be x.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm(const u16* x, u16* residual, const u16* weight, u16* y, float epsilon) {
  constexpr int VECTORS = WIDTH / 8;
  constexpr int TURNS = (VECTORS + THREADS - 1) / THREADS;
  Words weights[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    weights[turn] = load_words(weight + min(8 * (turn * THREADS + static_cast<int>(threadIdx.x)), WIDTH - 8));
  }
  wait_for_previous();
  allow_next();
  const u64 row = static_cast<u64>(blockIdx.x) * WIDTH;
  Words kept[TURNS];
  float squares = 0.0f;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = 8 * (turn * THREADS + threadIdx.x);
    if (column >= WIDTH) continue;
    kept[turn] = load_words(residual + row + column);
    if (x != nullptr) {
      const Words added = load_words(x + row + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        kept[turn].w[i] =
            pack(low(kept[turn].w[i]) + low(added.w[i]), high(kept[turn].w[i]) + high(added.w[i]));
      }
      *reinterpret_cast<Words*>(residual + row + column) = kept[turn];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      squares += low(kept[turn].w[i]) * low(kept[turn].w[i]) + high(kept[turn].w[i]) * high(kept[turn].w[i]);
    }
  }
  const float scale = rsqrtf(block_sum(squares) / WIDTH + epsilon);
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = 8 * (turn * THREADS + threadIdx.x);
    if (column >= WIDTH) continue;
    const Words& by = weights[turn];
    Words result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result.w[i] =
          pack(low(kept[turn].w[i]) * scale * low(by.w[i]), high(kept[turn].w[i]) * scale * high(by.w[i]));
    }
    *reinterpret_cast<Words*>(y + row + column) = result;
  }
}
