// The matrix registers of AMX, where this CPU has them.

#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define HAS_TILES 1
#include <immintrin.h>
#else
#define HAS_TILES 0
#endif

namespace {

// Tiles of AMX: 16 rows of 32 inputs, or 16 pairs of inputs times 16 outputs, in bf16; 16 times 16 sums in float32.
constexpr int64_t TILE_ROWS = 16, TILE_K = 32, TILE_BYTES = 1024, BAND = 2 * TILE_ROWS, MOST_TILE_STEPS = 4;

#if HAS_TILES

struct alignas(64) TileShape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct Tiles {
    Tiles() {
        const TileShape shape;
        _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
};

#else

struct Tiles {};

#endif

}  // namespace
