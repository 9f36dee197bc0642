"""Every hardware number of the Triton kernels: block sizes and warps by shape. A static table: autotuning needs a device."""

from typing import NamedTuple

#: Numbers that a lane holds: enough loads in flight, few enough registers. Short rows and pixels hold statistics beside them,
#: most of all pixels of a loss that needs a row twice or saves much.
PER_LANE = 32
PER_LANE_MANY_ROWS = 16
PER_LANE_CROWDED = 8
LANES = 32
MOST_WARPS = 16

#: NVIDIA's registers: of a multiprocessor, and the most of a lane.
REGISTERS = 65536
REGISTERS_PER_LANE = 255

#: Classes of a row that a program takes at a time, and so the longest row that a loss which needs it twice reads once.
LONGEST = 8192

#: Numbers in a block of several short rows, and rows and classes in a block of pixels.
SHORT_ROWS = 2048
PIXELS = 128
PIXEL_CLASSES = 32

#: Region: numbers of a block and its positions, classes that are read once, tiles that a program adds up, and the block in
#: which their sums are added.
REGION_NUMBERS = 2048
REGION_PIXELS = 64
REGION_WHOLE = 256
REGION_PER_LANE = 8
REGION_TILES = 16
REGION_CLASSES = 32
REGION_PARTS = 32

#: Linear layers: programs that fill a GPU, and bytes for the sums of gradients over parts of the rows or classes.
LINEAR_PROGRAMS = 256
LINEAR_BYTES = 64 * 2**20

#: Rows of a program that sees no logits.
ROWS_ALONE = 256

#: Partial sums that the last kernel of a reduction reads at a time.
FINISH = 1024


class Tile(NamedTuple):
    rows: int
    block: int  #: classes
    warps: int
    crowded: bool = False  #: registers are scarce


def tile(
    positions: int, classes: int, across_classes: bool, itemsize: int, *, twice: bool = False, crowded: bool = False
) -> Tile:
    """The block of a program: `across_classes` when neighbouring numbers are classes; `twice`: the row is needed twice;
    `crowded`: there are many statistics of a row. Each lane has a number: of less, the compiler makes several loads."""
    whole = _power_of_two(classes)
    wide = 2 if itemsize == 8 else 1  # float64 takes two registers a number
    if not across_classes:
        crowded = crowded or twice
        rows = min(PIXELS // wide // (2 if crowded else 1), max(LANES, _power_of_two(positions)))
        block = min(whole, PIXEL_CLASSES)
        return Tile(rows, block, _warps(rows * block * wide, PER_LANE_CROWDED if crowded else PER_LANE_MANY_ROWS), True)
    block = min(whole, LONGEST // wide)
    rows = max(1, LANES // block, min(SHORT_ROWS // wide // block, _power_of_two(positions)))
    return Tile(rows, block, _warps(rows * block * wide, PER_LANE_MANY_ROWS if rows > 1 or twice else PER_LANE), wide > 1)


def region_tile(positions: int, classes: int, across_classes: bool) -> Tile:
    """The same for the region family, whose sums over positions want many rows and hold four numbers for each."""
    whole = _power_of_two(classes)
    if whole <= REGION_WHOLE:
        rows = min(REGION_PIXELS, REGION_NUMBERS // whole)
        return Tile(rows, whole, _warps(rows * whole, REGION_PER_LANE), True)
    return Tile(32, 128, 8, True) if across_classes else Tile(REGION_PIXELS, PIXEL_CLASSES, 8, True)


class LinearTile(NamedTuple):
    rows: int
    classes: int
    features: int  #: that a product takes at a time
    warps: int
    stages: int  #: of loads under way


#: Where a row has one class, its label.
LINEAR_LABELS = LinearTile(16, 1, 128, 4, 1)


def linear_tile(itemsize: int, crowded: bool) -> LinearTile:
    """The tile of a linear layer's logits, by the type that the products take: tensor cores have halves; float32 and float64
    take their operands from registers. `crowded`: a logit takes more registers than its plain loss does."""
    if itemsize == 2:
        return LinearTile(64, 64, 64, 8, 3) if crowded else LinearTile(128, 128, 64, 8, 3)
    if itemsize == 4:
        return LinearTile(64, 32, 16, 8, 2) if crowded else LinearTile(64, 64, 16, 8, 2)
    return LinearTile(32, 32, 16, 8, 2)


def linear_gradient_tile(itemsize: int, crowded: bool, of_rows: bool) -> LinearTile:
    """The same where a program adds the tile's products to its own rows (or classes) in memory: few of them, each with many
    classes (or rows), read and write the least."""
    if itemsize == 2:
        if crowded:
            return LinearTile(64, 64, 32, 8, 3)
        return LinearTile(64, 128, 32, 8, 3) if of_rows else LinearTile(128, 32, 32, 8, 3)
    if itemsize == 4:
        return LinearTile(32, 64, 16, 8, 2) if of_rows else LinearTile(64, 32, 16, 8, 2)
    return linear_tile(itemsize, crowded)


def most_registers(warps: int) -> int:
    """What ptxas may use in a crowded block: left alone, it keeps to 128 registers and spills where a few more would do. In
    others it is left alone: it would take more than it needs."""
    return min(REGISTERS_PER_LANE, REGISTERS // (LANES * warps))


def _warps(numbers: int, each: int) -> int:
    return max(1, min(MOST_WARPS, _power_of_two(numbers // (each * LANES))))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
