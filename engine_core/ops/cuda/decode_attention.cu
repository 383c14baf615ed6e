// Attention of one query token per row over its pages, split over blocks by a plan made on the device (flash decoding,
// Dao et al. 2023, with the merge done by the block of a row that finishes last).
//
// Nothing here depends on lengths that the host knows: plan_splits cuts each row's pages into items once a step, and the
// grid of decode_attention holds as many blocks as there can be items; those beyond the count leave at once.
//
// A warp takes one page at a time, through a ring of STAGES pages in shared memory: bytes in flight, not registers, bound
// the pace on a share of the SMs and beside other work. With lane = 4 g + t and P the page's tokens: scores are Q (rows:
// query heads of the group) times K^T (columns: tokens), and the transposed output is V^T times P^T, so that the scores'
// layout is already that of the second product's operand.
//
// Compile-time parameters (-D):
//   HEAD_DIM   64 or 128
//   GROUP      query heads per kv head, 1 to 8
//   WARPS      warps of an attention block
//   STAGES     pages of a warp's ring, 2 or more
#include "device.cuh"

constexpr int PAGE = 16;  // tokens
constexpr int MOST_ROWS = 1024;
constexpr int MOST_SPLITS = 128;
constexpr int CHUNKS = HEAD_DIM / 32;  // 32-dimension chunks of a key
constexpr int HALVES = HEAD_DIM / 64;  // 64-dimension halves of a value

struct alignas(16) Item {
  int row;
  int first_page;  // index into the row's page table
  int pages;
  u16 splits;  // items of this row
  u16 split;   // this one's number among them
};

// Cuts the rows' pages into at most `wave` items of about equal size, or the next multiple of `wave` that holds a row
// each. One warp.
//   slots, positions: int32 [rows], slot -1 for padding; a row attends to positions 0 .. its own.
//   items: [rows + wave]; count: int32 [1].
extern "C" __global__ void __launch_bounds__(32)
    plan_splits(const int* slots, const int* positions, Item* items, int* count, int rows, int wave, int least_pages) {
  __shared__ int pages[MOST_ROWS];
  wait_for_previous();
  allow_next();
  const int lane = threadIdx.x;
  int live = 0, total = 0, longest = 0;
  for (int row = lane; row < rows; row += 32) {
    pages[row] = slots[row] < 0 ? 0 : positions[row] / PAGE + 1;
    live += pages[row] > 0;
    total += pages[row];
    longest = max(longest, pages[row]);
  }
  __syncwarp();
  live = sum_lanes(live);
  total = sum_lanes(total);
  longest = max_lanes(longest);
  const int limit = max((live + wave - 1) / wave, 1) * wave;
  const auto items_of = [&](int size) {
    int mine = 0;
    for (int row = lane; row < rows; row += 32) mine += (pages[row] + size - 1) / size;
    return sum_lanes(mine);
  };
  int size = max(max((total + limit - 1) / limit, (longest + MOST_SPLITS - 1) / MOST_SPLITS), least_pages);
  int enough = max(size, longest);  // one item a row
  while (size < enough) {
    const int middle = (size + enough) / 2;
    if (items_of(middle) <= limit) {
      enough = middle;
    } else {
      size = middle + 1;
    }
  }
  int place = 0;
  for (int first = 0; first < rows; first += 32) {
    const int row = first + lane;
    const int of_row = row < rows ? pages[row] : 0;
    const int splits = (of_row + size - 1) / size;
    int end = splits;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int lower = __shfl_up_sync(ALL_LANES, end, by);
      if (lane >= by) end += lower;
    }
    for (int split = 0; split < splits; ++split) {
      const int from = of_row * split / splits, to = of_row * (split + 1) / splits;
      items[place + end - splits + split] =
          Item{row, from, to - from, static_cast<u16>(splits), static_cast<u16>(split)};
    }
    place += __shfl_sync(ALL_LANES, end, 31);
  }
  if (lane == 0) *count = place;
}

struct Keys {
  Words of[2][CHUNKS];  // tokens g and g + 8, dimensions 32 chunk + 8t ..
};
struct Values {
  Words of[4][HALVES];  // tokens 2t, 2t+1, 2t+8, 2t+9, dimensions 64 half + 8g ..
};

// A stage holds a page as rows of HEAD_DIM values, its tokens' keys, then their values, in pieces of 16 bytes. A warp
// copies whole rows (memory is fetched by lines of 128 bytes); pieces are swapped within a row so that the eight lanes that
// a shared-memory access serves at a time, copying or taking fragments, meet eight different banks.
constexpr int ROW_PIECES = HEAD_DIM / 8;
constexpr int STAGE_WORDS = 2 * PAGE * ROW_PIECES;
constexpr int COPIED_ROWS = 32 / ROW_PIECES;  // by a warp at a time

__device__ inline int key_place(int token, int piece) { return token * ROW_PIECES + (piece ^ (token % 2 * 4)); }
__device__ inline int value_place(int token, int piece) {
  return (PAGE + token) * ROW_PIECES + (piece ^ (token / 2 % 4 * 2));
}

// One group of copies: the keys and values of the page at `base` into a stage.
__device__ inline void request(Words* stage, const u16* base, u64 stride, int lane) {
  const int piece = lane % ROW_PIECES;
#pragma unroll
  for (int first = 0; first < PAGE; first += COPIED_ROWS) {
    const int token = first + lane / ROW_PIECES;
    copy_async(stage + key_place(token, piece), base + token * stride + 8 * piece);
    copy_async(stage + value_place(token, piece), base + (PAGE + token) * stride + 8 * piece);
  }
}

__device__ inline void take(Keys& keys, const Words* stage, int group, int part) {
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      keys.of[upper][chunk] = stage[key_place(group + 8 * upper, 4 * chunk + part)];
    }
  }
}

__device__ inline void take(Values& values, const Words* stage, int group, int part) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      values.of[i][half] = stage[value_place(2 * part + i % 2 + 8 * (i / 2), 8 * half + group)];
    }
  }
}

// The running softmax of one warp. Lane 4 g + t keeps the maximum and its own tokens' sum for query g, and of the output
// dimensions 64 half + 8 g + 2 tile (+ 1 in the second row) for queries 2t and 2t + 1.
struct Running {
  float maximum = MINUS_INFINITY, sum = 0.0f;
  float output[HALVES][4][4] = {};

  __device__ void rescale(float lifted, int part) {
    const float factor = exp2_fast(maximum - lifted);
    maximum = lifted;
    sum *= factor;
    const float left = __shfl_sync(ALL_LANES, factor, 8 * part);
    const float right = __shfl_sync(ALL_LANES, factor, 8 * part + 4);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        output[half][tile][0] *= left;
        output[half][tile][1] *= right;
        output[half][tile][2] *= left;
        output[half][tile][3] *= right;
      }
    }
  }
};

struct Query {
  Words rows[CHUNKS];  // query g, dimensions 32 chunk + 8t ..
};

// Scores of query g for tokens 2t, 2t+1, 2t+8, 2t+9, scaled to base-2 exponents; -inf beyond the context.
__device__ inline void score(const Query& query, const Keys& keys, float scale, int part, int tokens, float (&s)[4]) {
  float lower[4] = {}, upper[4] = {};
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    const Words& q = query.rows[chunk];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const Words &k = keys.of[0][chunk], &l = keys.of[1][chunk];
      multiply_accumulate(lower, q.w[i], 0, q.w[i + 1], 0, k.w[i], k.w[i + 1]);
      multiply_accumulate(upper, q.w[i], 0, q.w[i + 1], 0, l.w[i], l.w[i + 1]);
    }
  }
  s[0] = 2 * part < tokens ? lower[0] * scale : MINUS_INFINITY;
  s[1] = 2 * part + 1 < tokens ? lower[1] * scale : MINUS_INFINITY;
  s[2] = 2 * part + 8 < tokens ? upper[0] * scale : MINUS_INFINITY;
  s[3] = 2 * part + 9 < tokens ? upper[1] * scale : MINUS_INFINITY;
}

// Adds one page to the running softmax.
__device__ inline void weigh(Running& running, float (&s)[4], int part) {
  const float highest = max_lanes<1, 2>(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])));
  const float lifted = fmaxf(running.maximum, highest);
  if (__any_sync(ALL_LANES, lifted > running.maximum)) running.rescale(lifted, part);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    s[i] = exp2_fast(s[i] - running.maximum);
    running.sum += s[i];
  }
}

__device__ inline void accumulate(Running& running, const Values& values, const float (&s)[4]) {
  const u32 early = pack(s[0], s[1]), late = pack(s[2], s[3]);
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const u32 v0 = values.of[0][half].w[tile], v1 = values.of[1][half].w[tile];
      const u32 v2 = values.of[2][half].w[tile], v3 = values.of[3][half].w[tile];
      multiply_accumulate(running.output[half][tile], low_halves(v0, v1), high_halves(v0, v1), low_halves(v2, v3),
                          high_halves(v2, v3), early, late);
    }
  }
}

// What lies beyond the context in the last page may be anything, NaN too, and 0 * NaN is NaN.
__device__ inline void blank(Values& values, int part, int tokens) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (2 * part + i % 2 + 8 * (i / 2) < tokens) continue;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) values.of[i][half] = Words{{0, 0, 0, 0}};
  }
}

struct Meeting {  // where a block's warps, then a row's items, merge
  float output[WARPS][GROUP][HEAD_DIM];
  float maximum[WARPS][GROUP];
  float sum[WARPS][GROUP];
  float shares[MOST_SPLITS][GROUP];
  bool is_last;
};
static_assert(sizeof(Meeting) <= WARPS * STAGES * STAGE_WORDS * sizeof(Words));

__device__ inline void leave(Meeting& meeting, const Running& running, int warp, int group, int part) {
  const float sum = sum_lanes<1, 2>(running.sum);
  if (part == 0 && group < GROUP) {
    meeting.maximum[warp][group] = running.maximum;
    meeting.sum[warp][group] = sum;
  }
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = 2 * part + i % 2;
        if (query < GROUP) {
          meeting.output[warp][query][64 * half + 8 * group + 2 * tile + i / 2] = running.output[half][tile][i];
        }
      }
    }
  }
}

// Partial results of items, by [item][kv head][query of the group].
struct Partials {
  float* output;  // [..][HEAD_DIM], divided by the sum
  Pair* weight;   // (maximum, sum)
};

__device__ inline float merged_sum(const Meeting& meeting, int query, float& maximum) {
  maximum = MINUS_INFINITY;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) maximum = fmaxf(maximum, meeting.maximum[warp][query]);
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    sum += meeting.sum[warp][query] * exp2_fast(meeting.maximum[warp][query] - maximum);
  }
  return sum;
}

// Merges the warps of the block into the result (a row's only item) or into the item's partial.
__device__ inline void merge_warps(const Meeting& meeting, const Item& item, const Partials& partials, u64 place,
                                   u16* result) {
  for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += 32 * WARPS) {
    const int query = i / HEAD_DIM, dimension = i % HEAD_DIM;
    float maximum;
    const float sum = merged_sum(meeting, query, maximum);
    float value = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      value += meeting.output[warp][query][dimension] * exp2_fast(meeting.maximum[warp][query] - maximum);
    }
    value /= sum;
    if (item.splits == 1) {
      result[i] = narrow(value);
    } else {
      partials.output[(place + query) * HEAD_DIM + dimension] = value;
      if (dimension == 0) partials.weight[place + query] = Pair{maximum, sum};
    }
  }
}

// The weight of each item's partial in the row's result, one warp a query.
__device__ inline void weigh_items(Meeting& meeting, const Partials& partials, u64 first, u64 stride, int splits) {
  constexpr int EACH = MOST_SPLITS / 32;
  const int lane = threadIdx.x % 32;
  for (int query = threadIdx.x / 32; query < GROUP; query += WARPS) {
    Pair weights[EACH];
    float maximum = MINUS_INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int split = lane + 32 * i;
      weights[i] = split < splits ? partials.weight[first + split * stride + query] : Pair{MINUS_INFINITY, 0.0f};
      maximum = fmaxf(maximum, weights[i].a);
    }
    maximum = max_lanes<1, 16>(maximum);
#pragma unroll
    for (int i = 0; i < EACH; ++i) total += weights[i].b * exp2_fast(weights[i].a - maximum);
    total = sum_lanes<1, 16>(total);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      meeting.shares[lane + 32 * i][query] = weights[i].b * exp2_fast(weights[i].a - maximum) / total;
    }
  }
}

// Merges the partials of a row's items.
__device__ inline void merge_items(Meeting& meeting, const Partials& partials, u64 first, u64 stride, int splits,
                                   u16* result) {
  constexpr int QUADS = HEAD_DIM / 4;
  weigh_items(meeting, partials, first, stride, splits);
  __syncthreads();
  const Quad* const outputs = reinterpret_cast<const Quad*>(partials.output);
  for (int i = threadIdx.x; i < GROUP * QUADS; i += 32 * WARPS) {
    const int query = i / QUADS;
    Quad value{};
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      const Quad part = outputs[(first + split * stride) * QUADS + i];
#pragma unroll
      for (int j = 0; j < 4; ++j) value.v[j] += meeting.shares[split][query] * part.v[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) result[4 * i + j] = narrow(value.v[j]);
  }
}

// grid: (rows + wave, kv_heads). At least one other launch lies between plan_splits and this.
//   q: bf16, row r's heads at q + r * q_stride; out: bf16 [rows, kv_heads * GROUP, HEAD_DIM]
//   kv: bf16 [pages, 2, PAGE, kv_heads, HEAD_DIM]; page_table: int32 [slots, table_width]
//   arrivals: u32 [rows, kv_heads], zero before the first launch and after each
//   dynamic shared memory: WARPS * STAGES * PAGE * 2 * HEAD_DIM * 2 bytes
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    decode_attention(const u16* q, const u16* kv, const int* slots, const int* positions, const int* page_table,
                     const Item* items, const int* count, u16* out, float* partial_output, Pair* partial_weight,
                     u32* arrivals, int q_stride, int table_width, float scale) {
  Meeting& meeting = *shared_memory<Meeting>();  // in the place of the rings, once all warps are done with them
  const int kv_heads = gridDim.y, kv_head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, part = lane % 4;
  const u64 stride = static_cast<u64>(kv_heads) * HEAD_DIM;  // from token to token
  const bool exists = static_cast<int>(blockIdx.x) < *count;
  const Item item = exists ? items[blockIdx.x] : Item{0, 0, 0, 1, 0};
  const int* const table = page_table + static_cast<u64>(exists ? slots[item.row] : 0) * table_width + item.first_page;
  const int length = positions[item.row] + 1 - item.first_page * PAGE;  // of the context, from the item's first page on
  const u16* const head = kv + kv_head * HEAD_DIM;
  Words* const ring = shared_memory<Words>() + warp * (STAGES * STAGE_WORDS);
  const int turns = (item.pages - warp + WARPS - 1) / WARPS;  // pages of this warp

  // Every turn commits one group of copies, empty where there is no page. Pages were written by earlier steps, save the
  // one with the newest token, the row's last.
  int entry = 0;  // of the page table, for the page that is requested next
  const auto look_up = [&](int turn) { return turn < turns ? table[warp + turn * WARPS] : 0; };
  const auto request_turn = [&](int turn) {
    if (turn < turns) {
      request(ring + turn % STAGES * STAGE_WORDS, head + entry * (2 * PAGE * stride), stride, lane);
    }
    commit_copies();
    entry = look_up(turn + 1);
  };
  entry = look_up(0);
  int requested = 0;
  while (requested < STAGES - 1 && requested < turns && length > (warp + requested * WARPS + 1) * PAGE) {
    request_turn(requested++);
  }
  wait_for_previous();
  allow_next();
  if (!exists) return;
  while (requested < STAGES - 1) request_turn(requested++);
  Running running;
  Query query;
  const u16* const queries = q + static_cast<u64>(item.row) * q_stride + (kv_head * GROUP + group) * HEAD_DIM;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    query.rows[chunk] = group < GROUP ? load_words(queries + 32 * chunk + 8 * part) : Words{{0, 0, 0, 0}};
  }
  for (int turn = 0; turn < turns; ++turn) {
    const int tokens = length - (warp + turn * WARPS) * PAGE;
    const Words* const stage = ring + turn % STAGES * STAGE_WORDS;
    wait_for_copies<STAGES - 2>();
    __syncwarp();  // the page is there for every lane, and every lane has left the stage that is filled next
    request_turn(requested++);
    Keys keys;
    take(keys, stage, group, part);
    float s[4];
    score(query, keys, scale, part, tokens, s);
    weigh(running, s, part);
    Values values;
    take(values, stage, group, part);
    if (tokens < PAGE) blank(values, part, tokens);
    accumulate(running, values, s);
  }
  __syncthreads();
  leave(meeting, running, warp, group, part);
  __syncthreads();

  const u64 stride_of_items = static_cast<u64>(kv_heads) * GROUP;
  const u64 place = (static_cast<u64>(blockIdx.x) * kv_heads + kv_head) * GROUP;
  u16* const result = out + (static_cast<u64>(item.row) * kv_heads + kv_head) * GROUP * HEAD_DIM;
  const Partials partials{partial_output, partial_weight};
  merge_warps(meeting, item, partials, place, result);
  if (item.splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    meeting.is_last = atomicInc(arrivals + item.row * kv_heads + kv_head, item.splits - 1) == item.splits - 1u;
    __threadfence();
  }
  __syncthreads();
  if (meeting.is_last) {
    merge_items(meeting, partials, place - item.split * stride_of_items, stride_of_items, item.splits, result);
  }
}
