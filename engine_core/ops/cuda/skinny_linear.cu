// y = x W^T for 1 to 16 rows of x: a stream of W from device memory straight into tensor-core fragments.
//
// One block owns 16 * ROW_TILES rows of W; its warps take turns at pieces of 64 columns and their sums meet in shared
// memory at the end. A fragment's columns may be permuted as long as both operands are permuted alike, so every lane
// loads 16 contiguous bytes of a row (columns 8t .. 8t+7 of 32) and needs no shared memory, no transposition.
// DEPTH pieces are in flight in registers; the first ones are requested before the previous kernel has finished.
//
// Compile-time parameters (-D):
//   COLUMNS    columns of W and x, a multiple of 64
//   WARPS      warps of a block
//   ROW_TILES  16-row tiles of W in a block
//   TOKEN_TILES  1 for up to 8 rows of x, 2 for up to 16
//   DEPTH      pieces in flight per warp
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
  Words norm[2];
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

__device__ inline void request(TokenPiece& piece, const Lane& lane, int turn, const u16* x, const u16* norm_weight,
                               int tokens) {
  if (!lane.has(turn)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = lane.column(turn) + 32 * half + 8 * lane.part;
    if (NORMED) piece.norm[half] = load_words(norm_weight + column);
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
      const int token = 8 * tile + lane.group;
      piece.rows[tile][half] = token < tokens ? load_words(x + token * COLUMNS + column) : Words{{0, 0, 0, 0}};
    }
  }
}

// Weights x by the norm's weight and adds up its squares.
__device__ inline u32 normed(u32 word, u32 weight, float& squares) {
  squares += low(word) * low(word) + high(word) * high(word);
  return pack(low(word) * low(weight), high(word) * high(weight));
}

__device__ inline void multiply(const WeightPiece& weights, TokenPiece& tokens, float (&sums)[ROW_TILES][TOKEN_TILES][4],
                                float (&squares)[TOKEN_TILES]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int token_tile = 0; token_tile < TOKEN_TILES; ++token_tile) {
      Words& x = tokens.rows[token_tile][half];
      if (NORMED) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x.w[i] = normed(x.w[i], tokens.norm[half].w[i], squares[token_tile]);
      }
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

__device__ inline void leave(Meeting& meeting, const Lane& lane, const float (&sums)[ROW_TILES][TOKEN_TILES][4],
                             const float (&squares)[TOKEN_TILES]) {
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
    if (NORMED) {
      const float total = sum_lanes<1, 2>(squares[token_tile]);
      if (lane.part == 0) meeting.squares[lane.warp][8 * token_tile + lane.group] = total;
    }
  }
}

__device__ inline float output(const Meeting& meeting, int token, int row, float scale) {
  if (EPILOGUE != GATED) return scale * meeting.sum(token, row);
  const int gate_row = 16 * (row / 8) + row % 8;
  const float gate = scale * meeting.sum(token, gate_row);
  const float up = scale * meeting.sum(token, gate_row + 8);
  return gate / (1.0f + exp2_fast(-gate * LOG2_E)) * up;
}

// grid: ceil(outputs / OUTPUT_ROWS); y is [tokens, outputs], x [tokens, COLUMNS], both contiguous; bias may be null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny_linear(const u16* weight, const u16* x, const u16* norm_weight, const u16* bias, const u16* residual, void* y,
                  int rows, int tokens, float epsilon) {
  __shared__ Meeting meeting;
  const Lane lane(weight, rows);
  WeightPiece weights[DEPTH];
  TokenPiece next[2];
  float sums[ROW_TILES][TOKEN_TILES][4] = {};
  float squares[TOKEN_TILES] = {};

#pragma unroll
  for (int turn = 0; turn < DEPTH && turn < TURNS; ++turn) request(weights[turn], lane, turn);
  wait_for_previous();
  allow_next();
  request(next[0], lane, 0, x, norm_weight, tokens);
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    if (turn + 1 < TURNS) request(next[(turn + 1) % 2], lane, turn + 1, x, norm_weight, tokens);
    if (lane.has(turn)) multiply(weights[turn % DEPTH], next[turn % 2], sums, squares);
    if (turn + DEPTH < TURNS) request(weights[turn % DEPTH], lane, turn + DEPTH);
  }
  leave(meeting, lane, sums, squares);
  __syncthreads();

  const int outputs = EPILOGUE == GATED ? rows / 2 : rows;
  for (int i = threadIdx.x; i < tokens * OUTPUT_ROWS; i += 32 * WARPS) {
    const int token = i / OUTPUT_ROWS;
    const int row = i % OUTPUT_ROWS;
    const int column = blockIdx.x * OUTPUT_ROWS + row;
    if (column >= outputs) continue;
    const u64 place = static_cast<u64>(token) * outputs + column;
    float value = output(meeting, token, row, NORMED ? meeting.scale(token, epsilon) : 1.0f);
    if (EPILOGUE != GATED && bias != nullptr) value += widen(bias[column]);
    if (EPILOGUE == ADD) value += widen(residual[place]);
    if (WIDE) {
      static_cast<float*>(y)[place] = value;
    } else {
      static_cast<u16*>(y)[place] = narrow(value);
    }
  }
}
