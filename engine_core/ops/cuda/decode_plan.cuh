// Which block of decode_attention attends to which pages of which row: all rows' pages, one behind the other, in equal
// stretches. Includes nothing: device.cuh comes before it.
#pragma once

constexpr int PAGE = 16;  // tokens
constexpr int MOST_ROWS = 1024;
constexpr int MOST_SPLITS = 128;

struct alignas(16) Item {
  u16 row;
  u16 slot;        // whose page table it is
  int first_page;  // index into that
  int tokens;      // of the context, from the item's first page on
  u16 pages;
  unsigned char splits;  // items of this row
  unsigned char split;   // this one's number among them
};
struct Range {
  int first, end;  // of a block's items
};

// So many pages, one row's behind another's, for so many blocks.
struct Shares {
  u64 pages, blocks;

  __device__ int begin(int block) const { return static_cast<int>(block * pages / blocks); }
  __device__ int block_of(int page) const { return static_cast<int>(((page + u64{1}) * blocks - 1) / pages); }
};

// Writes the items of a row whose pages begin at `begin` of all, behind `rank` other rows with any.
__device__ inline void cut_row(const Shares& shares, int row, int slot, int tokens, int begin, int rank, Item* items,
                               Range* ranges) {
  const int end = begin + (tokens + PAGE - 1) / PAGE;
  const int first = shares.block_of(begin), last = shares.block_of(end - 1);
  for (int block = first; block <= last; ++block) {
    const int share = shares.begin(block), next_share = shares.begin(block + 1);
    const int from = max(begin, share), to = min(end, next_share), index = block + rank;
    items[index] = Item{static_cast<u16>(row),
                        static_cast<u16>(slot),
                        from - begin,
                        tokens - (from - begin) * PAGE,
                        static_cast<u16>(to - from),
                        static_cast<unsigned char>(last - first + 1),
                        static_cast<unsigned char>(block - first)};
    if (from == share) ranges[block].first = index;
    if (to == next_share) ranges[block].end = index + 1;
  }
}

// Deals the rows' pages out to `blocks` blocks, or to fewer that get `least_pages` each. One warp.
//   slots, positions: int32 [rows], slot -1 for padding; a row attends to positions 0 .. its own.
//   items: [rows + blocks]; ranges: [blocks], empty for blocks that aren't needed.
extern "C" __global__ void __launch_bounds__(32)
    plan_splits(const int* slots, const int* positions, Item* items, Range* ranges, int rows, int blocks,
                int least_pages) {
  __shared__ int tokens[MOST_ROWS];
  wait_for_previous();
  allow_next();
  const int lane = threadIdx.x;
  const auto pages_of = [&](int row) { return row < rows ? (tokens[row] + PAGE - 1) / PAGE : 0; };
  int total = 0, longest = 0;
  for (int row = lane; row < rows; row += 32) {
    tokens[row] = slots[row] < 0 ? 0 : positions[row] + 1;
    total += pages_of(row);
    longest = max(longest, pages_of(row));
  }
  __syncwarp();
  total = sum_lanes(total);
  longest = max_lanes(longest);
  const int least = max(least_pages, (longest + MOST_SPLITS - 3) / (MOST_SPLITS - 2));
  const int needed = total == 0 ? 0 : max(1, min(blocks, total / least));
  const Shares shares{static_cast<u64>(total), static_cast<u64>(needed)};
  for (int block = needed + lane; block < blocks; block += 32) ranges[block] = Range{0, 0};
  int pages_before = 0, rows_before = 0;
  for (int first = 0; first < rows; first += 32) {
    const int row = first + lane, pages = pages_of(row);
    int end = pages, rank = pages > 0;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int lower = __shfl_up_sync(ALL_LANES, end, by), fewer = __shfl_up_sync(ALL_LANES, rank, by);
      if (lane >= by) end += lower, rank += fewer;
    }
    if (pages > 0) {
      cut_row(shares, row, slots[row], tokens[row], pages_before + end - pages, rows_before + rank - 1, items, ranges);
    }
    pages_before += __shfl_sync(ALL_LANES, end, 31);
    rows_before += __shfl_sync(ALL_LANES, rank, 31);
  }
}
