// Every hardware number of the CUDA kernels.
#pragma once
#include "cuda/launch.h"

namespace PYL_ISA {

constexpr int kWarp = 32;
constexpr int kVectorBytes = 16;  // of the widest load

// Threads of a block whose lanes share rows, and of a block that has a row (or a part of one) for itself.
constexpr int kLanesThreads = 256;
constexpr int kBlockThreads = 512, kBlockThreadsShort = 256;
constexpr int kShortRow = 8192;  // classes: the smaller block up to here

// Rows of up to so many classes are walked by lanes of a warp, with about so many classes for each.
constexpr int kLaneClasses = 4, kWarpClasses = 1024;
// Neighbouring rows lie closer than neighbouring classes: a lane a row, unless the rows are too few and long to fill a device.
constexpr int kPixelClasses = 256, kPixelRows = 4096;

// Ranks of a selection that a thread keeps in registers; a block has many threads for them.
constexpr int kLanesShortlist = 8, kBlockShortlist = 1;

// Vectors are worth their head and tail when every thread of a row gets so many.
constexpr int kVectorsEach = 2;

// Rows of more classes are split over several blocks when there are not enough rows to keep a device busy.
constexpr int kSplitClasses = 65536, kSplitRows = 256, kPartClasses = 16384;
constexpr int kMostParts = kWarp;  // a lane of one warp for each when they are put together

// Blocks of a launch: each takes several rows when there are more, and leaves one partial sum.
constexpr int kMostBlocks = 4096;
constexpr int kFinishThreads = 256;

// Region: positions that a lane adds up at a time, the fewest positions of a sum, how many sums there are of an area at most,
// and doubles that all of them may take.
constexpr int kRegionRows = 4, kFewestRows = 32, kMostChunks = 8192, kRegionDoubles = 1 << 21;

}  // namespace PYL_ISA
