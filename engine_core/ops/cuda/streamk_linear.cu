// x W^T for a few dozen rows of x, bound by the reading of W: stream-K (Osama et al. 2023) over a ring in shared memory.
//
// The chunks of W, a tile's outputs by CHUNK columns, lie one behind the other, tile after tile, and every block, as many as
// run at a time, gets an equal stretch of them: all SMs read to the end, however many tiles there are. What a block has of
// a tile is one of the tile's parts; parts.cuh adds them up, in an order that doesn't depend on who was first.
//
// A stage of the ring holds a chunk of W and the same columns of x, from where the tensor cores take both (wgmma), so that
// few warps and registers do. W is constant: the first stages are requested before the previous kernel has ended.
//
// Compile-time parameters (-D):
//   OUTPUTS, COLUMNS  rows and columns of W; COLUMNS a multiple of CHUNK
//   CHUNK        columns of a stage, a multiple of 64
//   TOKEN_TILES  rows of x in tiles of 8
//   ROW_TILES    64-row tiles of W in a warpgroup
//   WARPGROUPS   of a block
//   STAGES       of the ring, 3 or more
//   WHOLE        1: blocks get whole tiles, which have one part each
#include "device.cuh"

#include "parts.cuh"

constexpr int THREADS = 128 * WARPGROUPS;
constexpr int TILE = 64 * ROW_TILES * WARPGROUPS;
constexpr int TILES = (OUTPUTS + TILE - 1) / TILE;
constexpr int TOKENS = 8 * TOKEN_TILES;
constexpr int CHUNKS = COLUMNS / CHUNK;
constexpr int ATOMS = CHUNK / 64;  // columns of a stage, by as many as the tensor cores want in one piece
constexpr int ATOM_PIECES = 8;     // of 16 bytes, in an atom's row
constexpr int STAGE_WORDS = (TILE + TOKENS) * ATOMS * ATOM_PIECES;
constexpr int AHEAD = STAGES - 2;  // turns: one stage is multiplied, and one may still be
static_assert(COLUMNS % CHUNK == 0 && AHEAD > 0);

using Sums = float[ROW_TILES][4 * TOKEN_TILES];

// What a thread copies of every chunk: a piece of each AT_A_TIME-th row of an operand, turn after turn. Where from and where
// to are kept, not computed anew: on few SMs, beside other work, the instructions of a turn bound the pace.
template <int ROWS>
struct Copies {
  static constexpr int PIECES = ATOMS * ATOM_PIECES, AT_A_TIME = THREADS / PIECES;
  static_assert(AT_A_TIME % 8 == 0);  // rows of a thread lie alike within an operand's groups of eight

  const u16* from;  // the thread's piece of the chunk's row 0, or of its first row
  Words* to;
  int chunk, slot;

  __device__ Copies(const u16* rows, Words* stages, int chunk)
      : from(rows + chunk * CHUNK), to(stages), chunk(chunk), slot(0) {
    const int atom = threadIdx.x % PIECES / ATOM_PIECES, piece = threadIdx.x % ATOM_PIECES;
    from += 64 * atom + 8 * piece;
    to += atom * ROWS * ATOM_PIECES + operand_place(first(), piece);
  }
  __device__ static int first() { return threadIdx.x / PIECES; }
  // `jump`: from one tile's row to the next one's.
  __device__ void advance(int jump) {
    from += CHUNK;
    to += STAGE_WORDS;
    if (++chunk == CHUNKS) {
      chunk = 0;
      from += jump - COLUMNS;
    }
    if (++slot == STAGES) {
      slot = 0;
      to -= STAGES * STAGE_WORDS;
    }
  }
  // each(row counted from the thread's first, where it goes)
  template <class F>
  __device__ void visit(F&& each) const {
#pragma unroll
    for (int row = 0; row < ROWS; row += AT_A_TIME) {
      if (ROWS % AT_A_TIME == 0 || row + first() < ROWS) each(row, to + row * ATOM_PIECES);
    }
  }
};

// Of W. Rows beyond the last repeat it, and their results are dropped.
struct WeightCopies : Copies<TILE> {
  int left;  // rows from the tile's first on

  __device__ WeightCopies(const u16* weight, Words* stages, int begin)
      : Copies(weight + static_cast<u64>(begin / CHUNKS) * TILE * COLUMNS, stages, begin % CHUNKS),
        left(OUTPUTS - begin / CHUNKS * TILE) {
    if (OUTPUTS % TILE == 0) from += first() * COLUMNS;
  }
  __device__ void request() {
    visit([this](int row, Words* target) {
      copy_once(target, from + (OUTPUTS % TILE == 0 ? row : min(row + first(), left - 1)) * COLUMNS);
    });
    if (chunk == CHUNKS - 1) left -= TILE;
    advance(TILE * COLUMNS);
  }
};

// Of x, likewise.
struct InputCopies : Copies<TOKENS> {
  int places[(TOKENS + AT_A_TIME - 1) / AT_A_TIME];

  __device__ InputCopies(const u16* x, Words* stages, int begin, int tokens)
      : Copies(x, stages + TILE * ATOMS * ATOM_PIECES, begin % CHUNKS) {
    visit([&](int row, Words*) { places[row / AT_A_TIME] = min(row + first(), tokens - 1) * COLUMNS; });
  }
  __device__ void request() {
    visit([this](int row, Words* target) { copy_async(target, from + places[row / AT_A_TIME]); });
    advance(0);
  }
};

// The warpgroup's products of a stage, on their way; they begin the sums unless `add`.
__device__ inline void multiply(Sums& sums, const Words* stage, bool add) {
  const int first_row = threadIdx.x / 128 * (64 * ROW_TILES);
  begin_products();
#pragma unroll
  for (int atom = 0; atom < ATOMS; ++atom) {
    const Words* const weights = stage + (atom * TILE + first_row) * ATOM_PIECES;
    const Words* const inputs = stage + (ATOMS * TILE + atom * TOKENS) * ATOM_PIECES;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) {
        multiply_tile<TOKEN_TILES>(sums[tile], weights + tile * 64 * ATOM_PIECES, inputs, step, add || atom + step > 0);
      }
    }
  }
  commit_products();
}

// A part's sums to part[tokens][OUTPUTS].
__device__ inline void leave(const Sums& sums, float* part, int tile, int tokens) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = tile * TILE + warp / 4 * (64 * ROW_TILES) + 16 * (warp % 4) + lane / 4;
#pragma unroll
  for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
    for (int i = 0; i < 4 * TOKEN_TILES; ++i) {
      const int token = 8 * (i / 4) + 2 * (lane % 4) + i % 2, output = begin + 64 * row_tile + 8 * (i / 2 % 2);
      if (token < tokens && (OUTPUTS % TILE == 0 || output < OUTPUTS)) {
        part[static_cast<u64>(token) * OUTPUTS + output] = sums[row_tile][i];
      }
    }
  }
}

__device__ inline int share(int block) {  // the first chunk of a block
  const int blocks = gridDim.x;
  return WHOLE ? block * TILES / blocks * CHUNKS : block * (TILES * CHUNKS) / blocks;
}

// grid: blocks. x: bf16 [tokens, COLUMNS], tokens at most 8 TOKEN_TILES; weight: bf16 [OUTPUTS, COLUMNS]
//   parts: f32 [parts, tokens, OUTPUTS], of which parts.cuh says how many there are
//   dynamic shared memory: STAGES * STAGE_WORDS words
extern "C" __global__ void __launch_bounds__(THREADS)
    streamk_linear(const u16* weight, const u16* x, float* parts, int tokens) {
  const Parts deal{parts, tokens, OUTPUTS, TILE, CHUNKS, static_cast<int>(gridDim.x)};
  const int first = share(blockIdx.x), turns = share(blockIdx.x + 1) - first;
  Words* const stages = shared_memory<Words>();
  WeightCopies weights(weight, stages, first);
  InputCopies inputs(x, stages, first, tokens);
  Sums sums;
#pragma unroll
  for (int turn = 0; turn < AHEAD; ++turn) {
    if (turn < turns) weights.request();
  }
  wait_for_previous();
  allow_next();
#pragma unroll
  for (int turn = 0; turn < AHEAD; ++turn) {
    if (turn < turns) inputs.request();
    commit_copies();
  }
  const Words* stage = stages;
  for (int turn = 0; turn < turns;) {
    const int tile = (first + turn) / CHUNKS, begin = turn, end = min(turns, (tile + 1) * CHUNKS - first);
    for (; turn < end; ++turn) {
      wait_for_copies<AHEAD - 1>();
      show_copies();
      __syncthreads();  // the chunk is there, and all have left the stage before the last, which is filled next
      multiply(sums, stage, turn > begin);
      if (turn + AHEAD < turns) {
        weights.request();
        inputs.request();
      }
      commit_copies();
      stage = stage == stages + (STAGES - 1) * STAGE_WORDS ? stages : stage + STAGE_WORDS;
      wait_for_products<1>();
    }
    wait_for_products<0>();
    const int part = WHOLE ? 0 : static_cast<int>(blockIdx.x) - deal.block_of(tile * CHUNKS);
    leave(sums, parts + static_cast<u64>(part) * tokens * OUTPUTS, tile, tokens);
  }
}
