// y = x W^T for 1 to 16 rows of x: a stream of W from device memory straight into tensor-core fragments.
//
// One block owns 16 * ROW_TILES rows of W; its warps take turns at pieces of 64 columns and their sums meet in shared
// memory at the end. A fragment's columns may be permuted as long as both operands are permuted alike, so every lane
// loads 16 contiguous bytes of a row (columns 8t .. 8t+7 of 32) and needs no shared memory, no transposition.
// DEPTH pieces are in flight in registers; the first ones are requested before the previous kernel has finished. x comes
// straight from memory too, or, where it is to be normed, from shared memory, weighted once by the norm's weight; the
// norm's scale is a factor of the sums.
//
// Compile-time parameters (-D):
//   COLUMNS    columns of W and x, a multiple of 64
//   WARPS      warps of a block
//   ROW_TILES  16-row tiles of W in a block
//   TOKEN_TILES  1 for up to 8 rows of x, 2 for up to 16
//   DEPTH      pieces of W in flight per warp
//   AHEAD      pieces of x in flight per warp; without effect if NORMED
//   NORMED     1: x is the residual stream; y = (RMSNorm(x) weighted by norm_weight) W^T
//   EPILOGUE   PLAIN, ADD (y = residual + x W^T; y may be residual) or GATED (y = silu(gate) * up; W is gate over up)
//   WIDE       1: y is f32, 0: bf16
#include "device.cuh"

#define PLAIN 0
#define ADD 1
#define GATED 2

constexpr int PIECE = 64;
constexpr int PIECES = COLUMNS / PIECE;
constexpr int TURNS = (PIECES + WARPS - 1) / WARPS;
constexpr int IN_FLIGHT = NORMED ? 1 : AHEAD;
constexpr int TOKENS = 8 * TOKEN_TILES;
constexpr int BLOCK_ROWS = 16 * ROW_TILES;
constexpr int OUTPUT_ROWS = EPILOGUE == GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS;
static_assert(COLUMNS % PIECE == 0, "columns come in pieces of 64");

// What one lane holds of a piece of W: rows g and g + 8 of each tile, columns 8t.. of both halves of the piece.
struct WeightPiece {
  Words rows[ROW_TILES][2][2];  // [tile][row g, row g + 8][half]
};
struct TokenPiece {
  Words rows[TOKEN_TILES][2];  // [tile][half]
};

// This block's part of W, as one lane sees it.
struct Lane {
  int group, part, warp;
  const u16* first[ROW_TILES][2];

  __device__ Lane(const u16* weight, int rows) {
    const int lane = threadIdx.x % 32;
    group = lane / 4;
    part = lane % 4;
    warp = threadIdx.x / 32;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        first[tile][upper] = weight + static_cast<u64>(row(tile, upper, rows)) * COLUMNS + 8 * part;
      }
    }
  }

  // Rows beyond the end repeat the last one; their results are dropped.
  __device__ int row(int tile, int upper, int rows) const {
    if (EPILOGUE == GATED) {
      const int outputs = rows / 2;
      const int output = min(static_cast<int>(blockIdx.x) * OUTPUT_ROWS + 8 * tile + group, outputs - 1);
      return upper ? outputs + output : output;
    }
    return min(static_cast<int>(blockIdx.x) * OUTPUT_ROWS + 16 * tile + 8 * upper + group, rows - 1);
  }
  __device__ int column(int turn) const { return (warp + WARPS * turn) * PIECE; }
  __device__ bool has(int turn) const { return PIECES % WARPS == 0 || warp + WARPS * turn < PIECES; }
};

__device__ inline void request(WeightPiece& piece, const Lane& lane, int turn) {
  if (!lane.has(turn)) return;
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        piece.rows[tile][upper][half] = load_weights(lane.first[tile][upper] + lane.column(turn) + 32 * half);
      }
    }
  }
}

// Rows of weighted x in shared memory, padded by 64 bytes so that eight lanes (two rows) meet no bank conflict.
constexpr int STAGED_ROW = COLUMNS + 32;

__device__ inline void request(TokenPiece& piece, const Lane& lane, int turn, const u16* x, int tokens) {
  if (!lane.has(turn)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = lane.column(turn) + 32 * half + 8 * lane.part;
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
      const int token = 8 * tile + lane.group;
      piece.rows[tile][half] = Words{{0, 0, 0, 0}};
      if (token >= tokens) continue;
      if (NORMED) {
        piece.rows[tile][half] = *reinterpret_cast<const Words*>(shared_memory<u16>() + token * STAGED_ROW + column);
      } else {
        piece.rows[tile][half] = load_words(x + token * COLUMNS + column);
      }
    }
  }
}

__device__ inline void multiply(const WeightPiece& weights, const TokenPiece& inputs,
                                float (&sums)[ROW_TILES][TOKEN_TILES][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int token_tile = 0; token_tile < TOKEN_TILES; ++token_tile) {
      const Words& x = inputs.rows[token_tile][half];
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) {
        const Words& a = weights.rows[tile][0][half];
        const Words& b = weights.rows[tile][1][half];
        multiply_accumulate(sums[tile][token_tile], a.w[0], b.w[0], a.w[1], b.w[1], x.w[0], x.w[1]);
        multiply_accumulate(sums[tile][token_tile], a.w[2], b.w[2], a.w[3], b.w[3], x.w[2], x.w[3]);
      }
    }
  }
}

struct Meeting {  // where the warps' sums meet
  float sums[WARPS][TOKENS][BLOCK_ROWS + 1];
  float squares[WARPS][TOKENS];

  __device__ float sum(int token, int row) const {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp][token][row];
    return total;
  }
  __device__ float scale(int token, float epsilon) const {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += squares[warp][token];
    return rsqrtf(total / COLUMNS + epsilon);
  }
};

__device__ inline void leave(Meeting& meeting, const Lane& lane, const float (&sums)[ROW_TILES][TOKEN_TILES][4]) {
#pragma unroll
  for (int token_tile = 0; token_tile < TOKEN_TILES; ++token_tile) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * token_tile + 2 * lane.part + i % 2;
        meeting.sums[lane.warp][token][16 * tile + 8 * (i / 2) + lane.group] = sums[tile][token_tile][i];
      }
    }
  }
}

// Weights x by the norm's weight, into shared memory, and adds up its squares.
__device__ inline void stage(Meeting& meeting, const u16* x, const u16* norm_weight, int tokens) {
  constexpr int EACH = (COLUMNS / 8 + 32 * WARPS - 1) / (32 * WARPS);
  Words weights[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    weights[i] = load_words(norm_weight + min(8 * (i * 32 * WARPS + static_cast<int>(threadIdx.x)), COLUMNS - 8));
  }
#pragma unroll 2
  for (int token = 0; token < tokens; ++token) {
    Words values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {  // all of them before the first use
      const int column = 8 * (i * 32 * WARPS + threadIdx.x);
      values[i] = load_words(x + token * COLUMNS + min(column, COLUMNS - 8));
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int column = 8 * (i * 32 * WARPS + threadIdx.x);
      if (column >= COLUMNS) continue;
#pragma unroll
      for (u32 word = 0; word < 4; ++word) {
        u32& pair = values[i].w[word];
        squares += low(pair) * low(pair) + high(pair) * high(pair);
        pair = multiply_halves(pair, weights[i].w[word]);
      }
      *reinterpret_cast<Words*>(shared_memory<u16>() + token * STAGED_ROW + column) = values[i];
    }
    squares = sum_lanes<1, 16>(squares);
    if (threadIdx.x % 32 == 0) meeting.squares[threadIdx.x / 32][token] = squares;
  }
  __syncthreads();
}

__device__ inline float output(const Meeting& meeting, int token, int row, float scale) {
  if (EPILOGUE != GATED) return scale * meeting.sum(token, row);
  const int gate_row = 16 * (row / 8) + row % 8;
  const float gate = scale * meeting.sum(token, gate_row);
  const float up = scale * meeting.sum(token, gate_row + 8);
  return gate / (1.0f + exp2_fast(-gate * LOG2_E)) * up;
}

// The outputs that a thread finishes: their place in y, and what is added to them, requested early.
struct Finish {
  static constexpr int EACH = (TOKENS * OUTPUT_ROWS + 32 * WARPS - 1) / (32 * WARPS);
  float added[EACH];

  __device__ static int token(int i) { return (i * 32 * WARPS + threadIdx.x) / OUTPUT_ROWS; }
  __device__ static int row(int i) { return (i * 32 * WARPS + threadIdx.x) % OUTPUT_ROWS; }
  __device__ static int column(int i) { return blockIdx.x * OUTPUT_ROWS + row(i); }

  __device__ void request(const u16* bias, const u16* residual, int outputs, int tokens) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      added[i] = 0.0f;
      if (token(i) >= tokens || column(i) >= outputs) continue;
      if (EPILOGUE != GATED && bias != nullptr) added[i] = widen(bias[column(i)]);
      if (EPILOGUE == ADD) added[i] += widen(residual[static_cast<u64>(token(i)) * outputs + column(i)]);
    }
  }
};

// grid: ceil(outputs / OUTPUT_ROWS); y is [tokens, outputs], x [tokens, COLUMNS], both contiguous; bias may be null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny_linear(const u16* weight, const u16* x, const u16* norm_weight, const u16* bias, const u16* residual, void* y,
                  int rows, int tokens, float epsilon) {
  __shared__ Meeting meeting;
  const Lane lane(weight, rows);
  const int outputs = EPILOGUE == GATED ? rows / 2 : rows;
  WeightPiece weights[DEPTH];
  TokenPiece inputs[IN_FLIGHT];
  Finish finish;
  float sums[ROW_TILES][TOKEN_TILES][4] = {};

#pragma unroll
  for (int turn = 0; turn < DEPTH && turn < TURNS; ++turn) request(weights[turn], lane, turn);
  wait_for_previous();
  allow_next();
  if (NORMED) stage(meeting, x, norm_weight, tokens);
#pragma unroll
  for (int turn = 0; turn < IN_FLIGHT && turn < TURNS; ++turn) request(inputs[turn], lane, turn, x, tokens);
  finish.request(bias, residual, outputs, tokens);
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    if (lane.has(turn)) multiply(weights[turn % DEPTH], inputs[turn % IN_FLIGHT], sums);
    if (turn + DEPTH < TURNS) request(weights[turn % DEPTH], lane, turn + DEPTH);
    if (turn + IN_FLIGHT < TURNS) request(inputs[turn % IN_FLIGHT], lane, turn + IN_FLIGHT, x, tokens);
  }
  leave(meeting, lane, sums);
  __syncthreads();

#pragma unroll
  for (int i = 0; i < Finish::EACH; ++i) {
    const int token = finish.token(i);
    if (token >= tokens || finish.column(i) >= outputs) continue;
    const u64 place = static_cast<u64>(token) * outputs + finish.column(i);
    const float scale = NORMED ? meeting.scale(token, epsilon) : 1.0f;
    const float value = output(meeting, token, finish.row(i), scale) + finish.added[i];
    if (WIDE) {
      static_cast<float*>(y)[place] = value;
    } else {
      static_cast<u16*>(y)[place] = narrow(value);
    }
  }
}
