// Attention of one query token per row over its pages, dealt out evenly to blocks by a plan made on the device (flash
// decoding, Dao et al. 2023, with the merge done by the block of a row that finishes last).
//
// Nothing here depends on lengths that the host knows: once a step plan_splits lays all rows' pages one behind the other
// and gives every block of decode_attention, as many as run at the same time, an equal stretch of them. A block takes its
// rows' parts, its items, one after another.
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

#include "decode_plan.cuh"

constexpr int CHUNKS = HEAD_DIM / 32;  // 32-dimension chunks of a key
constexpr int HALVES = HEAD_DIM / 64;  // 64-dimension halves of a value

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
    copy_once(stage + key_place(token, piece), base + token * stride + 8 * piece);
    copy_once(stage + value_place(token, piece), base + (PAGE + token) * stride + 8 * piece);
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

__device__ inline Query load_query(const u16* row, int group) {
  Query query;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    query.rows[chunk] = group < GROUP ? load_words(row + 32 * chunk) : Words{{0, 0, 0, 0}};
  }
  return query;
}

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
static_assert(sizeof(Meeting) <= WARPS * STAGE_WORDS * sizeof(Words));

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

// A warp's copies of the pages of one item, STAGES - 1 turns ahead of their use. Every turn commits one group of copies,
// empty where there is no page.
//
// Memory lies by stage, then by warp: an item's first copies leave the last stage of all warps to a Meeting.
struct Ring {
  Words* stages;    // this warp's part of the first
  const u16* head;  // keys of the kv head in page 0
  u64 stride;       // from token to token
  int warp, lane;
  const int* table;  // of pages, from the item's first on
  int turns;         // pages of this warp
  int requested;     // turns
  Words* target;     // the stage that is filled next, kept, not computed: see copy_once
  int entry;         // of the table, for the page that is requested next

  __device__ int look_up(int turn) const { return turn < turns ? table[warp + turn * WARPS] : 0; }

  __device__ void enter(const Item& item, const int* page_table, int table_width) {
    table = page_table + static_cast<u64>(item.slot) * table_width + item.first_page;
    turns = (item.pages - warp + WARPS - 1) / WARPS;
    requested = 0;
    target = stages;
    entry = look_up(0);
  }

  __device__ void request_next() {
    if (requested < turns) request(target, head + entry * (2 * PAGE * stride), stride, lane);
    commit_copies();
    entry = look_up(++requested);
    target += WARPS * STAGE_WORDS;
    if (target == stages + STAGES * WARPS * STAGE_WORDS) target = stages;
  }

  // What may be requested before the previous kernel has ended: pages that earlier steps filled, which is all but a
  // row's last.
  __device__ void request_old(int tokens) {
    while (requested < STAGES - 1 && requested < turns && tokens > (warp + requested * WARPS + 1) * PAGE) {
      request_next();
    }
  }

  __device__ void fill() {
    while (requested < STAGES - 1) request_next();
  }

  __device__ Words* stage(int turn) const { return stages + turn % STAGES * (WARPS * STAGE_WORDS); }
};

// This warp's share of an item, whose first copies are on their way.
__device__ inline void attend(Running& running, Ring& ring, const Query& query, int tokens, float scale, int group,
                              int part) {
  for (int turn = 0; turn < ring.turns; ++turn) {
    const int left = tokens - (ring.warp + turn * WARPS) * PAGE;
    const Words* const stage = ring.stage(turn);
    wait_for_copies<STAGES - 2>();
    __syncwarp();  // the page is there for every lane, and every lane has left the stage that is filled next
    ring.request_next();
    Keys keys;
    take(keys, stage, group, part);
    float s[4];
    score(query, keys, scale, part, left, s);
    weigh(running, s, part);
    Values values;
    take(values, stage, group, part);
    if (left < PAGE) blank(values, part, left);
    accumulate(running, values, s);
  }
}

// Merges the warps' shares of an item, and the row's items where this one was the last to be done.
__device__ inline void finish(Meeting& meeting, const Item& item, int index, const Partials& partials, u32* arrivals,
                              u16* out) {
  const int kv_heads = gridDim.y, kv_head = blockIdx.y;
  const u64 stride = static_cast<u64>(kv_heads) * GROUP;
  const u64 place = index * stride + kv_head * GROUP;
  u16* const result = out + (static_cast<u64>(item.row) * kv_heads + kv_head) * GROUP * HEAD_DIM;
  merge_warps(meeting, item, partials, place, result);
  if (item.splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    meeting.is_last = atomicInc(arrivals + item.row * kv_heads + kv_head, item.splits - 1) == item.splits - 1u;
    __threadfence();
  }
  __syncthreads();
  if (meeting.is_last) merge_items(meeting, partials, place - item.split * stride, stride, item.splits, result);
}

// grid: (blocks, kv_heads). At least one other launch lies between plan_splits and this, not counting one that adds up a
// product's parts (allow_product in device.cuh), unless the product lies between as well.
//   q: bf16, row r's heads at q + r * q_stride; out: bf16 [rows, kv_heads * GROUP, HEAD_DIM]
//   kv: bf16 [pages, 2, PAGE, kv_heads, HEAD_DIM]; page_table: int32 [slots, table_width]
//   arrivals: u32 [rows, kv_heads], zero before the first launch and after each
//   dynamic shared memory: STAGES * WARPS * PAGE * 2 * HEAD_DIM * 2 bytes
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    decode_attention(const u16* q, const u16* kv, const int* page_table, const Item* items, const Range* ranges,
                     u16* out, float* partial_output, Pair* partial_weight, u32* arrivals, int q_stride,
                     int table_width, float scale) {
  Words* const shared = shared_memory<Words>();
  Meeting& meeting = *reinterpret_cast<Meeting*>(shared + (STAGES - 1) * (WARPS * STAGE_WORDS));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, part = lane % 4;
  const Partials partials{partial_output, partial_weight};
  const Range range = ranges[blockIdx.x];
  Item item = range.first < range.end ? items[range.first] : Item{};
  Ring ring{shared + warp * STAGE_WORDS, kv + blockIdx.y * HEAD_DIM, static_cast<u64>(gridDim.y) * HEAD_DIM, warp,
            lane};
  ring.enter(item, page_table, table_width);
  ring.request_old(item.tokens);
  wait_for_previous();
  allow_next();
  ring.fill();
  const u16* const queries = q + (blockIdx.y * GROUP + group) * HEAD_DIM + 8 * part;
  Query query = load_query(queries + static_cast<u64>(item.row) * q_stride, group);
  for (int index = range.first; index < range.end; ++index) {
    const Item next = index + 1 < range.end ? items[index + 1] : Item{};
    Running running;
    attend(running, ring, query, item.tokens, scale, group, part);
    ring.enter(next, page_table, table_width);
    ring.fill();
    query = load_query(queries + static_cast<u64>(next.row) * q_stride, group);
    __syncthreads();  // all warps have left the last stage
    leave(meeting, running, warp, group, part);
    __syncthreads();
    finish(meeting, item, index, partials, arrivals, out);
    item = next;
    __syncthreads();  // and now the meeting
  }
}
