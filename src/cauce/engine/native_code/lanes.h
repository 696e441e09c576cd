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

// Of x and y, one below the other and cut into blocks of S lanes: the first and the second half of each pair of blocks.
template <int S>
inline Lanes low(Lanes x, Lanes y) {
#define LANE(k) ((k) & S ? 16 + (k) - S : (k))
    return __builtin_shufflevector(x, y, LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7), LANE(8),
                                   LANE(9), LANE(10), LANE(11), LANE(12), LANE(13), LANE(14), LANE(15));
#undef LANE
}

template <int S>
inline Lanes high(Lanes x, Lanes y) {
#define LANE(k) ((k) & S ? 16 + (k) : (k) + S)
    return __builtin_shufflevector(x, y, LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7), LANE(8),
                                   LANE(9), LANE(10), LANE(11), LANE(12), LANE(13), LANE(14), LANE(15));
#undef LANE
}

template <int S>
inline void add_halves(Lanes* x) {
    for (int k = 0; k < S; ++k) x[k] = low<S>(x[k], x[k + S]) + high<S>(x[k], x[k + S]);
}

// Lane k is the sum of all lanes of x[k].
inline Lanes sum_of_each(Lanes* x) {
    add_halves<8>(x);
    add_halves<4>(x);
    add_halves<2>(x);
    add_halves<1>(x);
    return x[0];
}

template <int S>
inline void swap_halves(Lanes* x) {
    for (int k = 0; k < LANES; ++k)
        if ((k & S) == 0) {
            const Lanes upper = x[k];
            x[k] = low<S>(upper, x[k + S]);
            x[k + S] = high<S>(upper, x[k + S]);
        }
}

// Lane j of x[k] and lane k of x[j] change places; no lane changes a bit.
inline void turn_square(Lanes* x) {
    swap_halves<8>(x);
    swap_halves<4>(x);
    swap_halves<2>(x);
    swap_halves<1>(x);
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

template <class T>
void round_lanes(Lanes x, T* out, int64_t count) {
    float each[LANES];
    store(x, each);
    if (count == LANES)
#pragma omp simd
        for (int64_t j = 0; j < LANES; ++j) round_to(each[j], out[j]);
    else
        for (int64_t j = 0; j < count; ++j) round_to(each[j], out[j]);
}

}  // namespace
