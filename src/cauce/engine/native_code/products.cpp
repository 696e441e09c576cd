// Root-mean-square norm, and products with weights packed for AMX: M rows, N outputs, K inputs.

#include "numbers.h"
#include "tiles.h"

#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float epsilon, int threads) {
    // To wake a thread takes as long as the norms of a small batch.
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > 65536)
    for (int64_t row = 0; row < rows; ++row) norm_row(x + row * width, weight, out + row * width, width, epsilon);
}

#if HAS_TILES

// out [2 columns][16 ROWS, 16] = x [16 ROWS, K] times two columns of weight tiles. Two by two, so that each tile that
// is read serves two products.
template <int ROWS>
inline void multiply(const bf16* x, int64_t inputs, const uint8_t* left, const uint8_t* right, float* out) {
    const int64_t stride = inputs * 2, steps = inputs / TILE_K;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (ROWS > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < steps; ++k) {
        _tile_loadd(4, left + k * TILE_BYTES, 64);
        _tile_loadd(5, right + k * TILE_BYTES, 64);
        _tile_loadd(6, x + k * TILE_K, stride);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if constexpr (ROWS > 1) {
            _tile_loadd(7, x + TILE_ROWS * inputs + k * TILE_K, stride);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + BAND * TILE_ROWS, 64);
    if constexpr (ROWS > 1) {
        _tile_stored(2, out + TILE_ROWS * TILE_ROWS, 64);
        _tile_stored(3, out + (BAND + TILE_ROWS) * TILE_ROWS, 64);
    }
}

// Runs end(first row, number of rows, pair, sums [2, BAND, 16]) for every band of rows of x [M, K] and every pair of
// columns of tiles, whose products with x are the sums.
template <class End>
void for_pairs(const bf16* x, const uint8_t* left, const uint8_t* right, int64_t pair_bytes, int64_t pairs, int64_t rows,
               int64_t inputs, int threads, End end) {
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[2 * BAND * TILE_ROWS];
        const Tiles tiles;
#pragma omp for schedule(static) nowait
        for (int64_t pair = 0; pair < pairs; ++pair) {
            for (int64_t first = 0; first < rows; first += BAND) {
                const int64_t band = std::min(BAND, rows - first);
                const uint8_t *l = left + pair * pair_bytes, *r = right + pair * pair_bytes;
                if (band > TILE_ROWS)
                    multiply<2>(x + first * inputs, inputs, l, r, sums);
                else
                    multiply<1>(x + first * inputs, inputs, l, r, sums);
                end(first, band, pair, sums);
            }
        }
    }
}

inline void add_bias(float* sums, const bf16* bias, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row)
#pragma omp simd
        for (int64_t j = 0; j < TILE_ROWS; ++j) sums[row * TILE_ROWS + j] += widen(bias[j]);
}

#endif

}  // namespace

extern "C" {

int32_t has_tiles() {
#if HAS_TILES
    // The kernel gives tile registers to a process that asks: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 0;
#endif
}

#if HAS_TILES

// weight [N, K] -> tiles [N / 16, K / 32] of 16 pairs of inputs times 16 outputs.
void pack_tiles(const bf16* weight, uint8_t* packed, int64_t outputs, int64_t inputs, int32_t threads) {
    const int64_t steps = inputs / TILE_K;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < outputs / TILE_ROWS; ++n) {
        for (int64_t k = 0; k < steps; ++k) {
            uint32_t* tile = reinterpret_cast<uint32_t*>(packed + (n * steps + k) * TILE_BYTES);
            for (int64_t j = 0; j < TILE_ROWS; ++j) {
                uint32_t pairs[16];
                std::memcpy(pairs, weight + (n * TILE_ROWS + j) * inputs + k * TILE_K, 64);
                for (int64_t i = 0; i < 16; ++i) tile[i * 16 + j] = pairs[i];
            }
        }
    }
}

// out [M, N] = x [M, K] W^T + bias + other [M, N]; bias and other may be null. x has room for M rounded up to 32 rows,
// and N is a multiple of 32.
void multiply_tiles(const bf16* x, const uint8_t* packed, const bf16* bias, const bf16* other, bf16* out, int64_t rows,
                    int64_t outputs, int64_t inputs, int32_t threads) {
    const int64_t column_bytes = inputs / TILE_K * TILE_BYTES, width = 2 * TILE_ROWS;
    for_pairs(x, packed, packed + column_bytes, 2 * column_bytes, outputs / width, rows, inputs, threads,
              [=](int64_t first, int64_t band, int64_t pair, float* sums) {
                  for (int64_t side = 0; side < 2; ++side) {
                      const int64_t column = pair * width + side * TILE_ROWS;
                      float* half = sums + side * BAND * TILE_ROWS;
                      if (bias) add_bias(half, bias + column, band);
                      for (int64_t row = 0; row < band; ++row) {
                          const int64_t at = (first + row) * outputs + column;
                          float* sum = half + row * TILE_ROWS;
                          if (other)
#pragma omp simd
                              for (int64_t j = 0; j < TILE_ROWS; ++j) sum[j] += widen(other[at + j]);
#pragma omp simd
                          for (int64_t j = 0; j < TILE_ROWS; ++j) round_to(sum[j], out[at + j]);
                      }
                  }
              });
}

// out [M, N] = silu(x G^T + gate_bias) * (x U^T + up_bias); x as above, N a multiple of 16.
void gate_tiles(const bf16* x, const uint8_t* gate, const uint8_t* up, const bf16* gate_bias, const bf16* up_bias,
                bf16* out, int64_t rows, int64_t outputs, int64_t inputs, int32_t threads) {
    const int64_t column_bytes = inputs / TILE_K * TILE_BYTES;
    for_pairs(x, gate, up, column_bytes, outputs / TILE_ROWS, rows, inputs, threads,
              [=](int64_t first, int64_t band, int64_t pair, float* sums) {
                  float *gates = sums, *ups = sums + BAND * TILE_ROWS;
                  if (gate_bias) add_bias(gates, gate_bias + pair * TILE_ROWS, band);
                  if (up_bias) add_bias(ups, up_bias + pair * TILE_ROWS, band);
#pragma omp simd
                  for (int64_t i = 0; i < band * TILE_ROWS; ++i) {
                      // 1 / (1 + exp(-|x|)) and its mirror, so that exp_of sees no positive number
                      const float small = exp_of(-std::fabs(gates[i]));
                      ups[i] *= gates[i] * ((gates[i] < 0.0f ? small : 1.0f) / (1.0f + small));
                  }
                  for (int64_t row = 0; row < band; ++row)
#pragma omp simd
                      for (int64_t j = 0; j < TILE_ROWS; ++j)
                          round_to(ups[row * TILE_ROWS + j], out[(first + row) * outputs + pair * TILE_ROWS + j]);
              });
}

#endif

void rms_norm_float(const float* x, const float* weight, float* out, int64_t rows, int64_t width, float epsilon,
                    int32_t threads) {
    rms_norm(x, weight, out, rows, width, epsilon, threads);
}

void rms_norm_bf16(const bf16* x, const bf16* weight, bf16* out, int64_t rows, int64_t width, float epsilon,
                   int32_t threads) {
    rms_norm(x, weight, out, rows, width, epsilon, threads);
}

}  // extern "C"
