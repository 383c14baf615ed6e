// QK norm, rotary embedding and the KV write of one layer's tokens.
//
// Compile-time parameters (-D):
//   HEAD_DIM   64 or 128
//   QK_NORM    1 if queries and keys are normed
//   PARTS      1: queries, keys and values come as a product's parts (parts.cuh)
#include "device.cuh"

#include "parts.cuh"

constexpr int THREADS = 256;
constexpr int HALF = HEAD_DIM / 2;
constexpr int EACH = 4;             // neighbouring dimensions of each half that a lane holds
constexpr int LANES = HALF / EACH;  // of a head
constexpr int HEADS = THREADS / LANES;

struct alignas(8) Four {
  u32 w[2];  // two bf16 each, the lower half first
};

__device__ inline void widen(const Four& four, float (&values)[EACH]) {
#pragma unroll
  for (int i = 0; i < EACH; i += 2) {
    values[i] = low(four.w[i / 2]);
    values[i + 1] = high(four.w[i / 2]);
  }
}

__device__ inline Four narrow(const float (&values)[EACH]) {
  return Four{{pack(values[0], values[1]), pack(values[2], values[3])}};
}

__device__ inline void take(const Quad& sum, const u16* bias, int output, float (&values)[EACH]) {
  float added[EACH] = {};
  if (bias != nullptr) widen(*reinterpret_cast<const Four*>(bias + output), added);
#pragma unroll
  for (int i = 0; i < EACH; ++i) values[i] = sum.v[i] + added[i];
}

// Queries and keys of qkv [tokens, query_heads + 2 kv_heads, HEAD_DIM] are normed and rotated; queries go back where
// they came from, keys and values into the token's page. With PARTS all of them are the sums of `parts` and `bias` (which
// may be null), and qkv gets the queries. LANES lanes a head; a token of slot -1 is left alone.
//   positions, slots: int32 [tokens]; page_table: int32 [slots, table_width]; rope: f32 [positions, HEAD_DIM] (cos, then
//   sin of half the dimensions each); kv: bf16 [pages, 2, page_size, kv_heads, HEAD_DIM]
//   qkv, norms and kv are aligned to 8 bytes, rope to 16
// grid: (ceil(heads / HEADS), tokens).
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_and_store(u16* qkv, const u16* q_norm, const u16* k_norm, const float* rope, const int* positions,
                   const int* slots, const int* page_table, u16* kv, const u16* bias, Parts parts, int query_heads,
                   int kv_heads, int page_size, int table_width, float epsilon) {
  const int first_dimension = EACH * (static_cast<int>(threadIdx.x) % LANES);
  const int heads = query_heads + 2 * kv_heads;
  const int unbounded = static_cast<int>(blockIdx.x) * HEADS + static_cast<int>(threadIdx.x) / LANES;
  const int head = min(unbounded, heads - 1);
  const int token = blockIdx.y;
  const int slot = slots[token];
  const int position = positions[token];
  const bool is_query = head < query_heads;
  const bool is_value = head >= query_heads + kv_heads;
  const u64 page = slot < 0 ? 0 : page_table[static_cast<u64>(slot) * table_width + position / page_size];
  const float* const angles = rope + static_cast<u64>(position) * HEAD_DIM + first_dimension;
  const Quad cosine = *reinterpret_cast<const Quad*>(angles);
  const Quad sine = *reinterpret_cast<const Quad*>(angles + HALF);
  float first_weight[EACH], second_weight[EACH];
  if (QK_NORM) {
    const u16* const weight = (is_query ? q_norm : k_norm) + first_dimension;
    widen(*reinterpret_cast<const Four*>(weight), first_weight);
    widen(*reinterpret_cast<const Four*>(weight + HALF), second_weight);
  }
  const int output = head * HEAD_DIM + first_dimension;
  const int counts[2] = {PARTS ? parts.count(output) : 0, PARTS ? parts.count(output + HALF) : 0};
  if (PARTS) allow_product();
  wait_for_previous();
  if (!PARTS) allow_next();
  if (slot < 0) return;

  u16* const source = qkv + (static_cast<u64>(token) * heads + head) * HEAD_DIM + first_dimension;
  float first[EACH], second[EACH];
  if (PARTS) {
    Quad sums[2];
    parts.sum<2>(token, {output, output + HALF}, counts, sums);
    take(sums[0], bias, output, first);
    take(sums[1], bias, output + HALF, second);
  } else {
    widen(*reinterpret_cast<const Four*>(source), first);
    widen(*reinterpret_cast<const Four*>(source + HALF), second);
  }
  float scale = 1.0f;
  if (QK_NORM) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) squares += first[i] * first[i] + second[i] * second[i];
    scale = rsqrtf(sum_lanes<1, LANES / 2>(squares) / HEAD_DIM + epsilon);  // whole warps: their heads may differ in kind
  }
  if (unbounded >= heads) return;
  if (!is_value) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float left = QK_NORM ? first[i] * scale * first_weight[i] : first[i];
      const float right = QK_NORM ? second[i] * scale * second_weight[i] : second[i];
      first[i] = left * cosine.v[i] - right * sine.v[i];
      second[i] = right * cosine.v[i] + left * sine.v[i];
    }
  }
  u16* target = source;
  if (!is_query) {
    const int kv_head = (head - query_heads) % kv_heads;
    const u64 line = (2 * page + (is_value ? 1 : 0)) * page_size + position % page_size;
    target = kv + (line * kv_heads + kv_head) * HEAD_DIM + first_dimension;
  }
  *reinterpret_cast<Four*>(target) = narrow(first);
  *reinterpret_cast<Four*>(target + HALF) = narrow(second);
}
