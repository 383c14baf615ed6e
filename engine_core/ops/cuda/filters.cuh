// Which candidates of a row top-k and top-p keep, as a threshold: for one block of PICK_THREADS threads.
//
// The threshold is found exactly and without sorting: a histogram of distances from the maximum gives the bin it lies in,
// the bin's candidates are listed, and bisection over their bit patterns gives the value. Counts and masses are integers
// (a candidate weighs 2^40 exp(x - maximum)), so that no sum depends on its order. Included after device.cuh.
#pragma once

constexpr int PICK_THREADS = 512;
constexpr int BINS = 512;
constexpr int LISTED = 4096;  // candidates that shared memory holds
constexpr float MASS_ONE = 1099511627776.0f;  // 2^40: the mass of the likeliest candidate

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

// Floats as integers in the same order; the two zeros are one.
__device__ inline u32 key_of(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline u64 mass_of(float below) { return static_cast<u64>(exp2_fast(-below * LOG2_E) * MASS_ONE); }

// Every candidate of a row, with many loads in flight: work(value, candidate).
template <class Work>
__device__ inline void for_each(const float* row, int vocabulary, Work&& work) {
  constexpr int IN_FLIGHT = 8;
  const Quad* const quads = reinterpret_cast<const Quad*>(row);
  const int count = vocabulary / 4;
  for (int first = threadIdx.x; first < count; first += IN_FLIGHT * PICK_THREADS) {
    Quad values[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) values[i] = quads[min(first + i * PICK_THREADS, count - 1)];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int quad = first + i * PICK_THREADS;
      if (quad >= count) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) work(values[i].v[j], 4 * quad + j);
    }
  }
}

// How far below the maximum a histogram's bins begin and how fine they are, in nats. A trained model leaves few candidates
// in the first 8, which makes them cheap to count; what lies beyond 40 weighs nothing.
struct Scale {
  float origin, per_nat;

  __device__ int bin(float below) const {
    return min(static_cast<int>((fminf(below, 1e4f) - origin) * per_nat), BINS - 1);
  }
  __device__ float edge(int bin) const { return origin + static_cast<float>(bin) / per_nat; }
};
constexpr Scale FINE{0.0f, 64.0f}, COARSE{8.0f, 16.0f};

// A filtered row by its distance from the maximum. The last bin holds all that is further away.
struct Histogram {
  u32 counts[BINS];
  u64 masses[BINS];
  Upper nearer;  // than the first bin
  int cut;
  Upper before_cut;
  int listed;
  float values[LISTED];  // of the bin of the cut
};

// Returns the mass of the whole row.
__device__ __noinline__ u64 fill(Histogram& histogram, const float* row, int vocabulary, float maximum, Scale scale) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += PICK_THREADS) {
    histogram.counts[bin] = 0;
    histogram.masses[bin] = 0;
  }
  __syncthreads();
  Upper nearer{0, 0}, further{0, 0}, all_nearer, all_further;
  for_each(row, vocabulary, [&](float value, int) {
    const float below = maximum - value;
    const Upper one{1, mass_of(below)};
    if (below < scale.origin) {
      nearer.add(one);
    } else if (scale.bin(below) == BINS - 1) {
      further.add(one);
    } else {
      atomicAdd(&histogram.counts[scale.bin(below)], 1u);
      atomicAdd(&histogram.masses[scale.bin(below)], one.mass);
    }
  });
  scan_block(nearer, all_nearer);
  scan_block(further, all_further);
  if (threadIdx.x == 0) {
    histogram.nearer = all_nearer;
    histogram.counts[BINS - 1] = static_cast<u32>(all_further.count);
    histogram.masses[BINS - 1] = all_further.mass;
  }
  __syncthreads();
  Upper all;
  scan_block(Upper{0, histogram.masses[threadIdx.x]}, all);
  return all_nearer.mass + all.mass;
}
static_assert(BINS == PICK_THREADS, "each thread has a bin");

// The first bin by whose end the target is reached, and what comes before it.
__device__ inline void find_cut(Histogram& histogram, const Upper& target) {
  const int bin = threadIdx.x;
  Upper all;
  const Upper mine{histogram.counts[bin], histogram.masses[bin]};
  Upper end = scan_block(mine, all);
  end.add(histogram.nearer);
  const Upper before{end.count - mine.count, end.mass - mine.mass};
  if (bin == 0) histogram.listed = 0;
  if ((bin == 0 || !before.reaches(target)) && (bin == BINS - 1 || end.reaches(target))) {
    histogram.cut = bin;
    histogram.before_cut = before;
  }
  __syncthreads();
}

// Candidates by value: those of the cut's bin, or the whole row if that bin holds more than a list can.
struct Candidates {
  const float* values;
  int size;
  Upper above;  // of the candidates that aren't among these
  float maximum;

  __device__ Upper upper(u32 key) const {
    Upper mine{0, 0}, all;
    for (int i = threadIdx.x; i < size; i += PICK_THREADS) {
      if (key_of(values[i]) >= key) mine.add(Upper{1, mass_of(maximum - values[i])});
    }
    scan_block(mine, all);
    all.add(above);
    return all;
  }
};

struct Threshold {
  u32 key;
  Upper upper;  // the candidates at or above it
};

__device__ inline u64 share_of(float part, u64 mass) {
  return static_cast<u64>(static_cast<double>(part) * static_cast<double>(mass));
}

// What a threshold's upper set must hold.
struct Wanted {
  u64 count;
  float share;  // of the mass `of`, or of the whole row's if that is 0
  u64 of;

  __device__ Upper target(u64 whole) const { return Upper{count, share_of(share, of == 0 ? whole : of)}; }
};

// The largest key whose upper set holds what is wanted.
__device__ __noinline__ Threshold find_threshold(Histogram& histogram, const float* row, int vocabulary, float maximum,
                                           const Wanted& wanted) {
  Scale scale = FINE;
  const Upper target = wanted.target(fill(histogram, row, vocabulary, maximum, scale));
  find_cut(histogram, target);
  if (histogram.cut == BINS - 1) {
    scale = COARSE;
    fill(histogram, row, vocabulary, maximum, scale);
    find_cut(histogram, target);
  }
  const int cut = histogram.cut;
  Candidates candidates{row, vocabulary, Upper{0, 0}, maximum};
  if (histogram.counts[cut] <= LISTED) {
    for_each(row, vocabulary, [&](float value, int) {
      const float below = maximum - value;
      if (below >= scale.origin && scale.bin(below) == cut) {
        histogram.values[atomicAdd(&histogram.listed, 1)] = value;
      }
    });
    __syncthreads();
    candidates = Candidates{histogram.values, histogram.listed, histogram.before_cut, maximum};
  }
  // The bin's edges as keys, one bin wider for rounding; the last bin has no lower edge.
  const float upper_edge = scale.edge(cut - 1);
  u32 fails = upper_edge > 0.0f ? key_of(maximum - upper_edge) : key_of(maximum) + 1;
  u32 holds = cut < BINS - 1 ? key_of(maximum - scale.edge(cut + 2)) : 0;
  while (fails - holds > 1) {
    const u32 middle = holds + (fails - holds) / 2;
    (candidates.upper(middle).reaches(target) ? holds : fails) = middle;
  }
  return Threshold{holds, candidates.upper(holds)};
}

struct Filter {
  int top_k;
  float top_p, min_p;
};

// The key at or above which a row's candidates are kept, looking through the whole row.
__device__ inline u32 find_lowest(const Filter& filter, const float* row, int vocabulary, float maximum) {
  __shared__ Histogram histogram;
  u32 lowest = key_of(maximum + logf(filter.min_p));  // of -inf if min_p is 0
  u64 mass = 0;
  if (filter.top_k > 0) {
    const Wanted wanted{static_cast<u64>(min(filter.top_k, vocabulary)), 0.0f, 0};
    const Threshold by_rank = find_threshold(histogram, row, vocabulary, maximum, wanted);
    lowest = max(lowest, by_rank.key);
    mass = by_rank.upper.mass;
  }
  if (filter.top_p < 1.0f) {
    const Wanted wanted{0, filter.top_p, mass};
    lowest = max(lowest, find_threshold(histogram, row, vocabulary, maximum, wanted).key);
  }
  return lowest;
}
