// Attention over two spans of keys from what each span gave alone. -D HEAD_DIM: a multiple of 8, up to 256.
#include "device.cuh"

constexpr int THREADS = 256;
constexpr int LANES = HEAD_DIM / 8;  // threads of a row, 16 bytes each
constexpr int ROWS = THREADS / LANES;

// out[row] = the mean of out[row] and other[row], weighted by 2^lse of each; other_lse may be minus infinity (no keys),
// lse may not. A row is one head of one token. grid: ceil(rows / ROWS).
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_spans(const u16* other, const float* other_lse, u16* out, const float* lse, int rows) {
  wait_for_previous();
  allow_next();
  const int row = blockIdx.x * ROWS + threadIdx.x / LANES;
  if (threadIdx.x / LANES >= ROWS || row >= rows) return;
  const float first = lse[row], second = other_lse[row];
  const float most = fmaxf(first, second);
  const float first_weight = exp2_fast(first - most), second_weight = exp2_fast(second - most);
  const float scale = 1.0f / (first_weight + second_weight);
  const u64 at = static_cast<u64>(row) * HEAD_DIM + 8 * (threadIdx.x % LANES);
  const Words a = load_words(out + at), b = load_words(other + at);
  Words merged;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    merged.w[i] = pack(scale * (first_weight * low(a.w[i]) + second_weight * low(b.w[i])),
                       scale * (first_weight * high(a.w[i]) + second_weight * high(b.w[i])));
  }
  *reinterpret_cast<Words*>(out + at) = merged;
}
