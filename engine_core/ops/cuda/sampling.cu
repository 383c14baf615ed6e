// Drawing tokens on the device: bias and suppression, penalties, mask, temperature, top-k, top-p, min-p, and the draw.
//
// Four launches a step: edit_logits, score_logits and list_likely (a block a piece of a row), pick_token (a block a row).
// The draw is Gumbel-max: the largest of x + noise, where the noise of a candidate is Philox4x32-10 of (seed; position, candidate)
// alone. So a draw depends on no other row, nor on the order of anything: sums that decide are in integers.
//
// What top-k and top-p keep are all candidates at or above a threshold, ties included: top-k the k-th largest value,
// top-p the largest value whose upper set holds at least top_p of the mass that top-k left. min-p keeps what has at
// least min_p of the largest probability.
#include "device.cuh"
#include "filters.cuh"
#include "philox.cuh"

constexpr int SCORE_THREADS = 256;
constexpr int SCORE_EACH = 8;  // candidates of a thread
constexpr u32 IN_PROMPT = 0x80000000u;

// A slot's parameters, as sampling.py packs them.
struct Row {
  float temperature, top_p, min_p, repetition, presence, frequency;
  int top_k;
  int suppress_until;  // suppressed candidates can't be drawn at positions below this
  u64 seed;
  int suppressed;  // the first so many edits are suppressions …
  int edits;       // … and the others, up to this number, biases
  u32 penalized;
  u32 unused[3];
};
struct Edit {
  int candidate;
  float bias;
};

__device__ inline bool is_filtered(const Row& row) {
  return row.temperature > 0.0f && (row.top_k > 0 || row.top_p < 1.0f || row.min_p > 0.0f);
}

// ------------------------------ the best of many

struct Best {
  float score = MINUS_INFINITY;
  int candidate = 0x7fffffff;

  __device__ void meet(float other_score, int other_candidate) {
    if (other_score > score || (other_score == score && other_candidate < candidate)) {
      score = other_score;
      candidate = other_candidate;
    }
  }
};

template <int THREADS>
__device__ inline Best best_of_block(Best best) {
  __shared__ float scores[THREADS / 32];
  __shared__ int candidates[THREADS / 32];
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const float score = __shfl_xor_sync(ALL_LANES, best.score, mask);
    best.meet(score, __shfl_xor_sync(ALL_LANES, best.candidate, mask));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    scores[threadIdx.x / 32] = best.score;
    candidates[threadIdx.x / 32] = best.candidate;
  }
  __syncthreads();
  for (int warp = 0; warp < THREADS / 32; ++warp) best.meet(scores[warp], candidates[warp]);
  return best;
}

// ------------------------------ launches 1 and 2

// Adds biases and suppresses. grid: (rows). logits: f32 [rows, vocabulary], changed in place.
extern "C" __global__ void edit_logits(float* logits, const int* slots, const int* positions, const Row* rows,
                                       const Edit* edits, int most_edits, int vocabulary) {
  wait_for_previous();
  allow_next();
  const int slot = slots[blockIdx.x];
  if (slot < 0) return;
  const Row row = rows[slot];
  float* const x = logits + static_cast<u64>(blockIdx.x) * vocabulary;
  const Edit* const mine = edits + static_cast<u64>(slot) * most_edits;
  for (int i = row.suppressed + threadIdx.x; i < row.edits; i += blockDim.x) x[mine[i].candidate] += mine[i].bias;
  __syncthreads();  // a suppressed candidate may have a bias too
  if (positions[blockIdx.x] + 1 >= row.suppress_until) return;
  for (int i = threadIdx.x; i < row.suppressed; i += blockDim.x) x[mine[i].candidate] = MINUS_INFINITY;
}

__device__ inline float penalize(float x, u32 seen, const Row& row) {
  if (seen == 0) return x;
  x = x > 0.0f ? x / row.repetition : x * row.repetition;
  const u32 count = seen & ~IN_PROMPT;
  return count == 0 ? x : x - row.frequency * static_cast<float>(count) - row.presence;
}

// Penalties, mask and temperature; the best candidate of each piece of a row, with noise where every candidate is in the draw.
// A filtered row's values are written back for pick_token. grid: (ceil(vocabulary / piece), rows).
//   mask_of: int32 [rows], the row's mask, or -1; masks: u32 [masks, ceil(vocabulary / 32)], one bit a candidate, lowest
//   first: a candidate whose bit is 0 can't be drawn
//   seen: u32 [slots, vocabulary]: how often the output holds the candidate, and whether the prompt does
//   best_scores: f32, best_candidates: int32 [rows, pieces]; the candidate is -1 if a value is NaN or infinite
extern "C" __global__ void __launch_bounds__(SCORE_THREADS)
    score_logits(float* logits, const int* slots, const int* positions, const Row* rows, const u32* seen,
                 const int* mask_of, const u32* masks, float* best_scores, int* best_candidates, int vocabulary) {
  wait_for_previous();
  allow_next();
  const int slot = slots[blockIdx.y];
  if (slot < 0) return;
  const Row row = rows[slot];
  const bool filtered = is_filtered(row);
  const u32 position = positions[blockIdx.y] + 1;
  const int mask = mask_of[blockIdx.y];
  const u32* const words = mask < 0 ? nullptr : masks + static_cast<u64>(mask) * ((vocabulary + 31) / 32);
  Quad* const x = reinterpret_cast<Quad*>(logits + static_cast<u64>(blockIdx.y) * vocabulary);
  Best best;
  bool bad = false;
#pragma unroll
  for (int turn = 0; turn < SCORE_EACH / 4; ++turn) {
    const int quad = (blockIdx.x * (SCORE_EACH / 4) + turn) * SCORE_THREADS + threadIdx.x;
    if (4 * quad >= vocabulary) continue;
    Quad values = x[quad];
    const u32 allowed = words == nullptr ? 15u : words[quad / 8] >> (4 * (quad % 8));
    Random4 random{};
    if (row.temperature > 0.0f && !filtered) random = philox(row.seed, position, quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& value = values.v[i];
      bad |= !(value < -MINUS_INFINITY);
      if (row.penalized) value = penalize(value, seen[static_cast<u64>(slot) * vocabulary + 4 * quad + i], row);
      if (!(allowed >> i & 1)) value = MINUS_INFINITY;
      if (row.temperature > 0.0f) value /= row.temperature;
      best.meet(row.temperature > 0.0f && !filtered ? value + gumbel(random.v[i]) : value, 4 * quad + i);
    }
    if (filtered) x[quad] = values;
  }
  bad = __syncthreads_or(bad);
  best = best_of_block<SCORE_THREADS>(best);
  if (threadIdx.x == 0) {
    const int place = blockIdx.y * gridDim.x + blockIdx.x;
    best_scores[place] = best.score;
    best_candidates[place] = bad ? -1 : best.candidate;
  }
}

// ------------------------------ launch 3

// The candidates of a filtered row within NEAR of the maximum, in any order, and the mass of all others.
constexpr int MOST_LIKELY = PICK_THREADS;
constexpr float NEAR = 8.0f;
struct Likely {
  u64 other_mass;
  u32 count;  // more than MOST_LIKELY: the list is not complete
  u32 unused;
  float values[MOST_LIKELY];
  int candidates[MOST_LIKELY];
};

// Fills the lists, which pick_token has left empty. grid as for score_logits.
extern "C" __global__ void __launch_bounds__(SCORE_THREADS)
    list_likely(const float* logits, const int* slots, const Row* rows, const float* best_scores, Likely* likely,
                int vocabulary) {
  __shared__ u64 other_mass;
  wait_for_previous();
  allow_next();
  const int slot = slots[blockIdx.y];
  if (slot < 0 || !is_filtered(rows[slot])) return;
  if (threadIdx.x == 0) other_mass = 0;
  Best best;
  for (int i = threadIdx.x; i < gridDim.x; i += SCORE_THREADS) best.meet(best_scores[blockIdx.y * gridDim.x + i], i);
  const float maximum = best_of_block<SCORE_THREADS>(best).score;
  Likely& mine = likely[blockIdx.y];
  const Quad* const x = reinterpret_cast<const Quad*>(logits + static_cast<u64>(blockIdx.y) * vocabulary);
  u64 mass = 0;
#pragma unroll
  for (int turn = 0; turn < SCORE_EACH / 4; ++turn) {
    const int quad = (blockIdx.x * (SCORE_EACH / 4) + turn) * SCORE_THREADS + threadIdx.x;
    if (4 * quad >= vocabulary) continue;
    const Quad values = x[quad];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float below = maximum - values.v[i];
      if (!(below < NEAR)) {
        mass += mass_of(below);
        continue;
      }
      const u32 place = atomicAdd(&mine.count, 1u);
      if (place >= MOST_LIKELY) continue;
      mine.values[place] = values.v[i];
      mine.candidates[place] = 4 * quad + i;
    }
  }
  atomicAdd(&other_mass, mass);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&mine.other_mass, other_mass);
}

// ------------------------------ launch 4

// The threshold among the listed candidates, one a thread; false if it may lie beyond the list.
struct Listed {
  u32 keys[MOST_LIKELY];
  u64 masses[MOST_LIKELY];
  u32 by_rank, by_mass;
  u64 mass;
};

__device__ inline bool find_among_likely(Listed& listed, const Row& row, const Likely& likely, float maximum, u32& key) {
  const int count = likely.count, i = threadIdx.x;
  if (count > MOST_LIKELY) return false;
  // Candidates without mass can't be drawn, so where all others are such (most of a masked row's), the list is the row.
  const bool whole = likely.other_mass == 0;
  const int top_k = whole ? min(row.top_k, count) : row.top_k;
  const bool needs_more = top_k == 0 && row.top_p == 1.0f && maximum + logf(row.min_p) <= maximum - NEAR;
  if (!whole && (top_k > count || needs_more)) return false;
  listed.keys[i] = i < count ? key_of(likely.values[i]) : 0;
  listed.masses[i] = i < count ? mass_of(maximum - likely.values[i]) : 0;
  if (i == 0) {
    listed.by_rank = listed.by_mass = 0;
    listed.mass = likely.other_mass;
  }
  __syncthreads();
  Upper upper{0, 0};  // of this thread's candidate
  u64 all = 0;
  for (int j = 0; j < count; ++j) {
    if (listed.keys[j] >= listed.keys[i]) upper.add(Upper{1, listed.masses[j]});
    all += listed.masses[j];
  }
  if (i < count && top_k > 0 && upper.count >= top_k) atomicMax(&listed.by_rank, listed.keys[i]);
  __syncthreads();
  if (i == 0 && top_k == 0) listed.mass += all;
  if (i < count && top_k > 0 && listed.keys[i] == listed.by_rank) listed.mass = upper.mass;
  __syncthreads();
  if (row.top_p < 1.0f) {
    const u64 wanted = share_of(row.top_p, listed.mass);
    if (i < count && upper.mass >= wanted) atomicMax(&listed.by_mass, listed.keys[i]);
    __syncthreads();
    if (listed.by_mass == 0) return false;
  }
  key = max(max(listed.by_rank, listed.by_mass), key_of(maximum + logf(row.min_p)));
  return true;
}

// The filtered row's draw.
__device__ inline Best draw(const Row& row, const float* x, const Likely& likely, int vocabulary, float maximum,
                            u32 position) {
  __shared__ Listed listed;
  u32 key;
  Best best;
  if (find_among_likely(listed, row, likely, maximum, key)) {
    const int i = threadIdx.x;
    if (i < likely.count && listed.keys[i] >= key) {
      best.meet(likely.values[i] + noise_of(row.seed, position, likely.candidates[i]), likely.candidates[i]);
    }
  } else {
    key = find_lowest(Filter{row.top_k, row.top_p, row.min_p}, x, vocabulary, maximum);
    for_each(x, vocabulary, [&](float value, int candidate) {
      if (key_of(value) >= key) best.meet(value + noise_of(row.seed, position, candidate), candidate);
    });
  }
  return best_of_block<PICK_THREADS>(best);
}

// The token of each row. grid: (rows).
//   tokens: int32 [rows], -1 where the logits hold NaN or infinity, or nothing can be drawn; last_token: int32 [slots]
extern "C" __global__ void __launch_bounds__(PICK_THREADS)
    pick_token(const float* logits, const int* slots, const int* positions, const Row* rows, u32* seen,
               const float* best_scores, const int* best_candidates, Likely* likely, int* tokens, int* last_token,
               int pieces, int vocabulary) {
  wait_for_previous();
  allow_next();
  const int slot = slots[blockIdx.x];
  if (slot < 0) return;
  const Row row = rows[slot];
  Best best;
  bool bad = false;
  for (int i = threadIdx.x; i < pieces; i += PICK_THREADS) {
    const int candidate = best_candidates[blockIdx.x * pieces + i];
    bad |= candidate < 0;
    best.meet(best_scores[blockIdx.x * pieces + i], candidate);
  }
  bad = __syncthreads_or(bad);
  best = best_of_block<PICK_THREADS>(best);
  bad |= best.score == MINUS_INFINITY;
  if (!bad && is_filtered(row)) {
    best = draw(row, logits + static_cast<u64>(blockIdx.x) * vocabulary, likely[blockIdx.x], vocabulary, best.score,
                positions[blockIdx.x] + 1);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  likely[blockIdx.x].count = 0;
  likely[blockIdx.x].other_mass = 0;
  tokens[blockIdx.x] = bad ? -1 : best.candidate;
  if (bad) return;
  last_token[slot] = best.candidate;
  if (row.penalized) ++seen[static_cast<u64>(slot) * vocabulary + best.candidate];
}

// Fills a starting row's counts. Two launches: with `clear`, zeroes (grid covers the vocabulary), then counts (grid covers
// the ids). ids: int32 [length], prompt first.
extern "C" __global__ void count_seen(u32* seen, const int* ids, int slot, int prompt, int length, int vocabulary,
                                      int clear) {
  wait_for_previous();
  allow_next();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  u32* const mine = seen + static_cast<u64>(slot) * vocabulary;
  if (clear) {
    if (i < vocabulary) mine[i] = 0;
  } else if (i < prompt) {
    atomicOr(&mine[ids[i]], IN_PROMPT);
  } else if (i < length) {
    atomicAdd(&mine[ids[i]], 1u);
  }
}
