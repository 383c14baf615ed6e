// Drawing tokens on the device: bias and suppression, penalties, temperature, top-k, top-p, min-p, and the draw.
//
// Three launches a step: edit_logits, score_logits (a block a piece of a row) and pick_token (a block a row). The draw is
// Gumbel-max: the largest of x + noise, where the noise of a candidate is Philox4x32-10 of (seed; position, candidate)
// alone. So a draw depends on no other row, nor on the order of anything: sums that decide are in integers.
//
// What top-k and top-p keep are all candidates at or above a threshold, ties included: top-k the k-th largest value,
// top-p the largest value whose upper set holds at least top_p of the mass that top-k left. min-p keeps what has at
// least min_p of the largest probability.
#include "device.cuh"

constexpr int SCORE_THREADS = 256;
constexpr int SCORE_EACH = 8;  // candidates of a thread
constexpr int PICK_THREADS = 512;
constexpr int BINS = 1024;
constexpr float BINS_PER_NAT = 32.0f;  // the last bin begins where a candidate weighs less than 2^-40 of the likeliest
constexpr int LISTED = 2048;  // candidates that shared memory holds
constexpr float MASS_ONE = 1099511627776.0f;  // 2^40: the mass of the likeliest candidate
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

// ------------------------------ noise

struct Random4 {
  u32 v[4];
};

// Salmon et al. 2011, called as ops/philox.py does: the noise of block = candidate / 4.
__device__ inline Random4 philox(u64 seed, u32 position, u32 block) {
  u32 c0 = block, c1 = 0, c2 = position, c3 = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Random4{{c0, c1, c2, c3}};
}

__device__ inline float gumbel(u32 bits) {
  const float uniform = fminf(static_cast<float>(bits) * (1.0f / 4294967296.0f) + 1.0f / 8589934592.0f, 1.0f - 0x1p-24f);
  return -logf(-log1pf(-uniform));
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

struct Upper {  // a set of candidates, or what to reach with one
  u64 count, mass;

  __device__ bool reaches(const Upper& other) const { return count >= other.count && mass >= other.mass; }
  __device__ void add(const Upper& other) {
    count += other.count;
    mass += other.mass;
  }
};

// Inclusive sums in the order of threads; `total` gets the last.
__device__ inline Upper scan_block(Upper value, Upper& total) {
  __shared__ Upper sums[PICK_THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const Upper lower{__shfl_up_sync(ALL_LANES, value.count, by), __shfl_up_sync(ALL_LANES, value.mass, by)};
    if (lane >= by) value.add(lower);
  }
  __syncthreads();
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  total = Upper{0, 0};
  for (int i = 0; i < PICK_THREADS / 32; ++i) {
    if (i == warp) value.add(total);
    total.add(sums[i]);
  }
  return value;
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

// Penalties and temperature; the best candidate of each piece of a row, with noise where every candidate is in the draw.
// A filtered row's values are written back for pick_token. grid: (ceil(vocabulary / piece), rows).
//   seen: u32 [slots, vocabulary]: how often the output holds the candidate, and whether the prompt does
//   best_scores: f32, best_candidates: int32 [rows, pieces]; the candidate is -1 if a value is NaN or infinite
extern "C" __global__ void __launch_bounds__(SCORE_THREADS)
    score_logits(float* logits, const int* slots, const int* positions, const Row* rows, const u32* seen,
                 float* best_scores, int* best_candidates, int vocabulary) {
  wait_for_previous();
  allow_next();
  const int slot = slots[blockIdx.y];
  if (slot < 0) return;
  const Row row = rows[slot];
  const bool filtered = is_filtered(row);
  const u32 position = positions[blockIdx.y] + 1;
  Quad* const x = reinterpret_cast<Quad*>(logits + static_cast<u64>(blockIdx.y) * vocabulary);
  Best best;
  bool bad = false;
#pragma unroll
  for (int turn = 0; turn < SCORE_EACH / 4; ++turn) {
    const int quad = (blockIdx.x * (SCORE_EACH / 4) + turn) * SCORE_THREADS + threadIdx.x;
    if (4 * quad >= vocabulary) continue;
    Quad values = x[quad];
    Random4 random{};
    if (row.temperature > 0.0f && !filtered) random = philox(row.seed, position, quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& value = values.v[i];
      bad |= !(value < -MINUS_INFINITY);
      if (row.penalized) value = penalize(value, seen[static_cast<u64>(slot) * vocabulary + 4 * quad + i], row);
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

// Floats as integers in the same order.
__device__ inline u32 key_of(float value) {
  const u32 bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline u64 mass_of(float below) { return static_cast<u64>(exp2_fast(-below * LOG2_E) * MASS_ONE); }

__device__ inline int bin_of(float below) { return min(static_cast<int>(below * BINS_PER_NAT), BINS - 1); }

// The candidates among which a filtered row's threshold lies: all of the row, or a list of the likely ones.
struct Candidates {
  const float* row;
  const float* listed_values;
  const int* listed;  // null: the whole row
  int size;
  float maximum;

  __device__ float value(int i) const { return listed ? listed_values[i] : row[i]; }
  __device__ int candidate(int i) const { return listed ? listed[i] : i; }

  __device__ Upper upper(u32 key) const {
    Upper mine{0, 0}, all;
    for (int i = threadIdx.x; i < size; i += PICK_THREADS) {
      if (key_of(value(i)) >= key) mine.add(Upper{1, mass_of(maximum - value(i))});
    }
    scan_block(mine, all);
    return all;
  }

  // The largest key whose upper set reaches the target; that of `lowest` is known to.
  __device__ u32 threshold(u32 lowest, const Upper& target) const {
    u32 holds = lowest, fails = key_of(maximum) + 1;
    while (fails - holds > 1) {
      const u32 middle = holds + (fails - holds) / 2;
      (upper(middle).reaches(target) ? holds : fails) = middle;
    }
    return holds;
  }
};

struct Histogram {
  u32 counts[BINS];
  u64 masses[BINS];
  int cut, listed;
  float listed_values[LISTED];
  int candidates[LISTED];
};

__device__ inline void fill(Histogram& histogram, const float* x, int vocabulary, float maximum) {
  for (int i = threadIdx.x; i < BINS; i += PICK_THREADS) {
    histogram.counts[i] = 0;
    histogram.masses[i] = 0;
  }
  if (threadIdx.x == 0) {
    histogram.cut = BINS - 1;
    histogram.listed = 0;
  }
  __syncthreads();
  const Quad* const quads = reinterpret_cast<const Quad*>(x);
  for (int quad = threadIdx.x; quad < vocabulary / 4; quad += PICK_THREADS) {
    const Quad values = quads[quad];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float below = maximum - values.v[i];
      const int bin = bin_of(fminf(below, 1e4f));
      if (bin == BINS - 1) continue;  // weighs nothing, and whoever needs these looks at the whole row
      atomicAdd(&histogram.counts[bin], 1u);
      atomicAdd(&histogram.masses[bin], mass_of(below));
    }
  }
  __syncthreads();
}

// The mass of all bins.
__device__ inline u64 mass_of_all(const Histogram& histogram) {
  Upper mine{0, 0}, all;
  for (int bin = threadIdx.x; bin < BINS; bin += PICK_THREADS) mine.mass += histogram.masses[bin];
  scan_block(mine, all);
  return all.mass;
}

// The first bin by whose end the target is reached; BINS - 1 if none is.
__device__ inline int find_cut(Histogram& histogram, const Upper& target) {
  constexpr int EACH = BINS / PICK_THREADS;
  Upper mine{0, 0}, all;
  for (int i = 0; i < EACH; ++i) {
    mine.add(Upper{histogram.counts[EACH * threadIdx.x + i], histogram.masses[EACH * threadIdx.x + i]});
  }
  const Upper end = scan_block(mine, all);
  Upper at{end.count - mine.count, end.mass - mine.mass};
  for (int i = 0; i < EACH; ++i) {
    const int bin = EACH * threadIdx.x + i;
    const bool before = bin > 0 && at.reaches(target);
    at.add(Upper{histogram.counts[bin], histogram.masses[bin]});
    if (!before && at.reaches(target)) histogram.cut = bin;
  }
  __syncthreads();
  return histogram.cut;
}

// Lists the candidates of bins 0 .. cut. False if they are too many.
__device__ inline bool list(Histogram& histogram, const float* x, int vocabulary, float maximum, int cut) {
  if (cut == BINS - 1) return false;
  for (int i = threadIdx.x; i < vocabulary; i += PICK_THREADS) {
    if (bin_of(fminf(maximum - x[i], 1e4f)) > cut) continue;
    const int place = atomicAdd(&histogram.listed, 1);
    if (place < LISTED) {
      histogram.listed_values[place] = x[i];
      histogram.candidates[place] = i;
    }
  }
  __syncthreads();
  return histogram.listed <= LISTED;
}

__device__ inline u64 share_of(float top_p, u64 mass) {
  return static_cast<u64>(static_cast<double>(top_p) * static_cast<double>(mass));
}

// The key at or above which a filtered row's candidates are in the draw. Leaves in `candidates` what to look through.
__device__ inline u32 find_threshold(Histogram& histogram, const Row& row, Candidates& candidates) {
  const float maximum = candidates.maximum, lowest_by_min_p = maximum + logf(row.min_p);  // -inf if min_p is 0
  fill(histogram, candidates.row, candidates.size, maximum);
  u64 mass = mass_of_all(histogram);
  const Upper by_rank{static_cast<u64>(min(row.top_k, candidates.size)), 0};
  int cut;
  if (row.top_k > 0) {
    cut = find_cut(histogram, by_rank);
  } else if (row.top_p < 1.0f) {
    cut = find_cut(histogram, Upper{0, share_of(row.top_p, mass)});
  } else {
    cut = bin_of(fminf(maximum - lowest_by_min_p, 1e4f));
  }
  u32 lowest = 0;  // the list, or the row, reaches every target from here
  if (list(histogram, candidates.row, candidates.size, maximum, cut)) {
    candidates.listed = histogram.candidates;
    candidates.size = histogram.listed;
    lowest = key_of(maximum - (cut + 2) / BINS_PER_NAT);
  }
  u32 threshold = key_of(lowest_by_min_p);
  if (row.top_k > 0) {
    const u32 key = candidates.threshold(lowest, by_rank);
    mass = candidates.upper(key).mass;
    threshold = max(threshold, key);
  }
  if (row.top_p < 1.0f) {
    threshold = max(threshold, candidates.threshold(lowest, Upper{0, share_of(row.top_p, mass)}));
  }
  return threshold;
}

// The filtered row's draw.
__device__ inline Best draw(const Row& row, const float* x, int vocabulary, float maximum, u32 position) {
  __shared__ Histogram histogram;
  Candidates candidates{x, histogram.listed_values, nullptr, vocabulary, maximum};
  const u32 threshold = find_threshold(histogram, row, candidates);
  Best best;
  for (int i = threadIdx.x; i < candidates.size; i += PICK_THREADS) {
    if (key_of(candidates.value(i)) < threshold) continue;
    const int candidate = candidates.candidate(i);
    best.meet(candidates.value(i) + gumbel(philox(row.seed, position, candidate / 4).v[candidate % 4]), candidate);
  }
  return best_of_block<PICK_THREADS>(best);
}

// The token of each row. grid: (rows).
//   tokens: int32 [rows], -1 where the logits hold NaN or infinity, or nothing can be drawn; last_token: int32 [slots]
extern "C" __global__ void __launch_bounds__(PICK_THREADS)
    pick_token(const float* logits, const int* slots, const int* positions, const Row* rows, u32* seen,
               const float* best_scores, const int* best_candidates, int* tokens, int* last_token, int pieces,
               int vocabulary) {
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
    best = draw(row, logits + static_cast<u64>(blockIdx.x) * vocabulary, vocabulary, best.score,
                positions[blockIdx.x] + 1);
  }
  if (threadIdx.x != 0) return;
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
