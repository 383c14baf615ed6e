// A matrix product as partial sums, which streamk_linear leaves and whoever needs the product adds up.
#pragma once

// Outputs come in tiles of `tile`, a tile's columns in `chunks`; the chunks of all tiles, one tile behind the other, are
// dealt out to `blocks` in equal stretches, so that a tile is the sum of as many parts as blocks have some of it.
struct Parts {
  const float* sums;  // [part][tokens][outputs]; null: there is nothing to add up
  int tokens, outputs, tile, chunks, blocks;

  __device__ int block_of(int chunk) const { return ((chunk + 1) * blocks - 1) / (tiles() * chunks); }
  __device__ int tiles() const { return (outputs + tile - 1) / tile; }
  // Parts of an output: to be asked for before the previous launch is waited for.
  __device__ int count(int output) const {
    const int first = output / tile * chunks;
    return block_of(first + chunks - 1) - block_of(first) + 1;
  }
  // Of N times four outputs each, from multiples of four on, their sums. Loads are on their way together, eight of them.
  template <int N>
  __device__ void sum(int token, const int (&outputs_at)[N], const int (&counts)[N], Quad (&totals)[N]) const {
    constexpr int AT_A_TIME = 8 / N;
    const float* const place = sums + static_cast<u64>(token) * outputs;
    const u64 stride = static_cast<u64>(tokens) * outputs;
    int most = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      totals[i] = Quad{};
      most = max(most, counts[i]);
    }
    for (int begin = 0; begin < most; begin += AT_A_TIME) {
      Quad added[N][AT_A_TIME] = {};
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < AT_A_TIME; ++j) {
          if (begin + j >= counts[i]) continue;
          added[i][j] = *reinterpret_cast<const Quad*>(place + outputs_at[i] + (begin + j) * stride);
        }
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < AT_A_TIME; ++j) {
#pragma unroll
          for (int k = 0; k < 4; ++k) totals[i].v[k] += added[i][j].v[k];
        }
      }
    }
  }
};
