// QK norm, rotary embedding and the KV write of one layer's tokens.
//
// Compile-time parameters (-D):
//   HEAD_DIM   64 or 128
//   QK_NORM    1 if queries and keys are normed
#include "device.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Queries and keys of qkv [tokens, query_heads + 2 kv_heads, HEAD_DIM] are normed and rotated; queries go back where
// they came from, keys and values into the token's page. One warp a head; a token of slot -1 is left alone.
//   positions, slots: int32 [tokens]; page_table: int32 [slots, table_width]; rope: f32 [positions, HEAD_DIM] (cos, then
//   sin of half the dimensions each); kv: bf16 [pages, 2, page_size, kv_heads, HEAD_DIM]
// grid: (ceil(heads / WARPS), tokens).
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_and_store(u16* qkv, const u16* q_norm, const u16* k_norm, const float* rope, const int* positions,
                   const int* slots, const int* page_table, u16* kv, int query_heads, int kv_heads, int page_size,
                   int table_width, float epsilon) {
  constexpr int HALF = HEAD_DIM / 2;
  constexpr int EACH = HALF / 32;  // neighbouring dimensions of each half that a lane holds
  const int lane = threadIdx.x % 32;
  const int heads = query_heads + 2 * kv_heads;
  const int head = min(static_cast<int>(blockIdx.x) * WARPS + static_cast<int>(threadIdx.x) / 32, heads - 1);
  const int token = blockIdx.y;
  const int slot = slots[token];
  const int position = positions[token];
  const bool is_query = head < query_heads;
  const bool is_value = head >= query_heads + kv_heads;
  const u64 page = slot < 0 ? 0 : page_table[static_cast<u64>(slot) * table_width + position / page_size];
  const float* const angles = rope + static_cast<u64>(position) * HEAD_DIM + EACH * lane;
  const u16* const weight = (is_query ? q_norm : k_norm) + EACH * lane;
  float cosine[EACH], sine[EACH], first_weight[EACH], second_weight[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    cosine[i] = angles[i];
    sine[i] = angles[HALF + i];
    if (!QK_NORM) continue;
    first_weight[i] = widen(weight[i]);
    second_weight[i] = widen(weight[HALF + i]);
  }
  wait_for_previous();
  allow_next();
  if (slot < 0 || blockIdx.x * WARPS + threadIdx.x / 32 >= heads) return;

  u16* const source = qkv + (static_cast<u64>(token) * heads + head) * HEAD_DIM + EACH * lane;
  float first[EACH], second[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    first[i] = widen(source[i]);
    second[i] = widen(source[HALF + i]);
  }
  if (!is_value) {
    float scale = 1.0f;
    if (QK_NORM) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; ++i) squares += first[i] * first[i] + second[i] * second[i];
      scale = rsqrtf(sum_lanes<1, 16>(squares) / HEAD_DIM + epsilon);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float left = QK_NORM ? first[i] * scale * first_weight[i] : first[i];
      const float right = QK_NORM ? second[i] * scale * second_weight[i] : second[i];
      first[i] = left * cosine[i] - right * sine[i];
      second[i] = right * cosine[i] + left * sine[i];
    }
  }
  u16* target = source;
  if (!is_query) {
    const int kv_head = (head - query_heads) % kv_heads;
    const u64 line = (2 * page + (is_value ? 1 : 0)) * page_size + position % page_size;
    target = kv + (line * kv_heads + kv_head) * HEAD_DIM + EACH * lane;
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    target[i] = narrow(first[i]);
    target[HALF + i] = narrow(second[i]);
  }
}
