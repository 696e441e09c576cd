// Drawing a token from a row of logits, as in sampling.py: R rows, V vocabulary.

#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;  // of the two-level distribution, as in sampling.py

template <class T>
inline float logit_of(const T* row, int64_t v, float divisor) {
    return widen(row[v]) / divisor;
}

template <class T>
void draw(const T* logits, int64_t rows, int64_t vocabulary, const float* divisor, const int64_t* row_of,
          const double* uniform, const uint8_t* greedy, int64_t draws, int64_t* token, float* logp, double* total_of,
          int32_t threads) {
    const int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
    std::vector<double> cumulative(rows * blocks);
    std::vector<float> largest(rows);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; ++r) {
        const T* row = logits + r * vocabulary;
        const float by = divisor[r];
        float most = -INFINITY;
#pragma omp simd reduction(max : most)
        for (int64_t v = 0; v < vocabulary; ++v) most = std::max(most, widen(row[v]));
        most /= by;
        double running = 0.0;
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t end = std::min(vocabulary, (b + 1) * BLOCK);
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t v = b * BLOCK; v < end; ++v) sum += exp_of(logit_of(row, v, by) - most);
            // A number that is none is lost in max and exp_of, but not in a sum.
            float check = 0.0f;
#pragma omp simd reduction(+ : check)
            for (int64_t v = b * BLOCK; v < end; ++v) check += widen(row[v]) != widen(row[v]) ? 1.0f : 0.0f;
            running += check > 0.0f ? NAN : sum;
            cumulative[r * blocks + b] = running;
        }
        largest[r] = most;
        total_of[r] = std::isfinite(most) ? running : NAN;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < draws; ++n) {
        const int64_t r = row_of[n];
        const T* row = logits + r * vocabulary;
        const double *sums = &cumulative[r * blocks], total = total_of[r];
        const float by = divisor[r];
        int64_t chosen = 0;
        if (greedy[r]) {
            while (chosen + 1 < vocabulary && !(logit_of(row, chosen, by) >= largest[r])) ++chosen;
        } else {
            const double target = std::min(uniform[n] * total, std::nextafter(total, 0.0));
            int64_t b = 0;
            while (b + 1 < blocks && sums[b] <= target) ++b;
            const double before = b > 0 ? sums[b - 1] : 0.0;
            const int64_t end = std::min(vocabulary, (b + 1) * BLOCK);
            float weight[BLOCK];
            double inner = 0.0;
            for (int64_t v = b * BLOCK; v < end; ++v) {
                weight[v - b * BLOCK] = exp_of(logit_of(row, v, by) - largest[r]);
                inner += weight[v - b * BLOCK];
            }
            const double rest = std::min(target - before, std::nextafter(inner, 0.0));
            double running = 0.0;
            for (chosen = b * BLOCK; chosen < end; ++chosen) {
                running += weight[chosen - b * BLOCK];
                if (running > rest) break;
            }
        }
        token[n] = chosen;
        logp[n] = static_cast<float>(logit_of(row, chosen, by) - (static_cast<double>(largest[r]) + std::log(total)));
    }
}

}  // namespace

extern "C" {

// Tokens [draws] and their log-probabilities; total_of [R] is not finite where a row of logits has none to draw from.
void draw_float(const float* logits, int64_t rows, int64_t vocabulary, const float* divisor, const int64_t* row_of,
                const double* uniform, const uint8_t* greedy, int64_t draws, int64_t* token, float* logp,
                double* total_of, int32_t threads) {
    draw(logits, rows, vocabulary, divisor, row_of, uniform, greedy, draws, token, logp, total_of, threads);
}

void draw_bf16(const bf16* logits, int64_t rows, int64_t vocabulary, const float* divisor, const int64_t* row_of,
               const double* uniform, const uint8_t* greedy, int64_t draws, int64_t* token, float* logp,
               double* total_of, int32_t threads) {
    draw(logits, rows, vocabulary, divisor, row_of, uniform, greedy, draws, token, logp, total_of, threads);
}

}  // extern "C"
