// Residual add and RMSNorm of whole rows in one pass.
//
// Compile-time parameters (-D):
//   WIDTH     the hidden size, a multiple of EACH
//   THREADS   of a block, whole warps
//   PARTS     1: what is added comes as a product's parts (parts.cuh)
#include "device.cuh"

#include "parts.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int EACH = PARTS ? 4 : 8;  // columns of a thread at a time
constexpr int PAIRS = EACH / 2;
constexpr int TURNS = (WIDTH / EACH + THREADS - 1) / THREADS;

struct alignas(2 * EACH) Columns {
  u32 w[PAIRS];  // two bf16 each, the lower half first
};

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

__device__ inline Columns load(const u16* place) { return *reinterpret_cast<const Columns*>(place); }

__device__ inline int column_of(int turn) { return EACH * (turn * THREADS + static_cast<int>(threadIdx.x)); }

// residual += x (nothing if x is null) or the sum of `parts`, then y = RMSNorm(residual) * weight. One block a row; y may
// be x.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm(const u16* x, u16* residual, const u16* weight, u16* y, Parts parts, float epsilon) {
  Columns weights[TURNS];
  int counts[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = min(column_of(turn), WIDTH - EACH);
    weights[turn] = load(weight + column);
    counts[turn] = PARTS ? parts.count(column) : 0;
  }
  if (PARTS) allow_product();
  wait_for_previous();
  if (!PARTS) allow_next();
  const u64 row = static_cast<u64>(blockIdx.x) * WIDTH;
  Columns kept[TURNS];
  float squares = 0.0f;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = column_of(turn);
    if (column >= WIDTH) continue;
    kept[turn] = load(residual + row + column);
    float added[EACH] = {};
    if (PARTS) {
      Quad sum[1];
      parts.sum<1>(blockIdx.x, {column}, {counts[turn]}, sum);
#pragma unroll
      for (int i = 0; i < 4; ++i) added[i] = sum[0].v[i];
    } else if (x != nullptr) {
      const Columns given = load(x + row + column);
#pragma unroll
      for (int i = 0; i < EACH; ++i) added[i] = i % 2 ? high(given.w[i / 2]) : low(given.w[i / 2]);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      u32& pair = kept[turn].w[i];
      pair = pack(low(pair) + added[2 * i], high(pair) + added[2 * i + 1]);
      squares += low(pair) * low(pair) + high(pair) * high(pair);
    }
    if (PARTS || x != nullptr) *reinterpret_cast<Columns*>(residual + row + column) = kept[turn];
  }
  const float scale = rsqrtf(block_sum(squares) / WIDTH + epsilon);
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = column_of(turn);
    if (column >= WIDTH) continue;
    Columns result;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const u32 pair = kept[turn].w[i], by = weights[turn].w[i];
      result.w[i] = pack(low(pair) * scale * low(by), high(pair) * scale * high(by));
    }
    *reinterpret_cast<Columns*>(y + row + column) = result;
  }
}
