// The sum of models/weights_hash.py over raw bytes, in one pass.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t STEP = 32;  // words at a time: sums and weights stay in registers

// The sum over mix(v_j) (j stride + 1) of `count` whole words, the first of which is the word j = first.
uint64_t sum_of(const uint8_t* bytes, int64_t count, uint64_t first, uint64_t stride) {
    uint64_t sums[STEP] = {}, weights[STEP];
    for (int64_t i = 0; i < STEP; ++i) weights[i] = (first + static_cast<uint64_t>(i)) * stride + 1;
    int64_t j = 0;
    for (; j + STEP <= count; j += STEP) {
        uint64_t v[STEP];
        std::memcpy(v, bytes + 8 * j, sizeof v);
#pragma omp simd
        for (int64_t i = 0; i < STEP; ++i) {
            sums[i] += (v[i] ^ (v[i] >> 32)) * weights[i];
            weights[i] += STEP * stride;
        }
    }
    uint64_t total = 0;
    for (uint64_t sum : sums) total += sum;
    for (; j < count; ++j) {
        uint64_t v;
        std::memcpy(&v, bytes + 8 * j, 8);
        total += (v ^ (v >> 32)) * ((first + static_cast<uint64_t>(j)) * stride + 1);
    }
    return total;
}

}  // namespace

extern "C" {

// Of all bytes, the last word filled with zeros; stride is 2 A.
void weights_sum(const uint8_t* bytes, int64_t count, uint64_t first, uint64_t stride, uint64_t* sum, int32_t threads) {
    const int64_t words = count / 8, share = (words + threads - 1) / threads;
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) if (threads > 1)
    for (int32_t thread = 0; thread < threads; ++thread) {
        const int64_t from = std::min(words, thread * share);
        total += sum_of(bytes + 8 * from, std::min(words, from + share) - from, first + static_cast<uint64_t>(from), stride);
    }
    if (count % 8 != 0) {
        uint64_t last = 0;
        std::memcpy(&last, bytes + 8 * words, count % 8);
        total += sum_of(reinterpret_cast<const uint8_t*>(&last), 1, first + static_cast<uint64_t>(words), stride);
    }
    *sum = total;
}

}  // extern "C"
