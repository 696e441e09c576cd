// Sixteen float32 numbers at a time, in one register where the CPU has such wide ones. Written out where a compiler left
// to itself keeps sums in memory, or adds the lanes of one register after another.

#pragma once

#include "numbers.h"

namespace {

constexpr int64_t LANES = 16;

typedef float Lanes __attribute__((vector_size(4 * LANES)));

inline Lanes lanes(const float* x) {
    Lanes all;
    std::memcpy(&all, x, sizeof all);
    return all;
}

inline void store(Lanes all, float* x) { std::memcpy(x, &all, sizeof all); }

// Lane k is the sum of all lanes of x[k]: halves of two are added at a time, then quarters, eighths and single lanes.
inline Lanes sum_of_each(Lanes* x) {
    for (int k = 0; k < 8; ++k)
        x[k] = __builtin_shufflevector(x[k], x[k + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x[k], x[k + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int k = 0; k < 4; ++k)
        x[k] = __builtin_shufflevector(x[k], x[k + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(x[k], x[k + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int k = 0; k < 2; ++k)
        x[k] = __builtin_shufflevector(x[k], x[k + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(x[k], x[k + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

inline Lanes larger(Lanes x, Lanes y) { return x > y ? x : y; }

inline float largest_of(Lanes x) {
    float most = x[0];
    for (int k = 1; k < LANES; ++k) most = x[k] > most ? x[k] : most;
    return most;
}

inline float sum_of(Lanes x) {
    float sum = x[0];
    for (int k = 1; k < LANES; ++k) sum += x[k];
    return sum;
}

template <class T>
void widen_all(const T* x, int64_t count, float* wide) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) wide[i] = widen(x[i]);
}

}  // namespace
