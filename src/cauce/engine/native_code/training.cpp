// What a training pass does between its matrix products: norms, positions, the gate, the loss's log-probabilities, the
// gradients of each, and the optimizer's step. N rows, D hidden width, F width of the gate, V vocabulary. Loops over rows are shared out in
// a fixed way, so that sums over rows come out the same each time.

#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace {

constexpr int64_t FEW = 65536;  // numbers that one thread is done with before another would have woken

inline int32_t threads_for(int64_t count, int32_t threads) { return count > FEW ? threads : 1; }

#if defined(__SSE2__)

// A square of 8 by 8 numbers of 16 bits, turned.
inline void turn_square(const bf16* from, int64_t stride, bf16* to, int64_t to_stride) {
    __m128i a[8], b[8];
    for (int64_t i = 0; i < 8; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
    for (int64_t i = 0; i < 4; ++i) {
        b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int64_t i = 0; i < 8; i += 4) {
        a[i] = _mm_unpacklo_epi32(b[i], b[i + 2]);
        a[i + 1] = _mm_unpackhi_epi32(b[i], b[i + 2]);
        a[i + 2] = _mm_unpacklo_epi32(b[i + 1], b[i + 3]);
        a[i + 3] = _mm_unpackhi_epi32(b[i + 1], b[i + 3]);
    }
    for (int64_t i = 0; i < 4; ++i) {
        b[2 * i] = _mm_unpacklo_epi64(a[i], a[i + 4]);
        b[2 * i + 1] = _mm_unpackhi_epi64(a[i], a[i + 4]);
    }
    for (int64_t i = 0; i < 8; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), b[i]);
}

#else

inline void turn_square(const bf16* from, int64_t stride, bf16* to, int64_t to_stride) {
    for (int64_t i = 0; i < 8; ++i)
        for (int64_t j = 0; j < 8; ++j) to[j * to_stride + i] = from[i * stride + j];
}

#endif

// Rotates heads in place by their positions, or back: forward (x cos + turned(x) sin), back its transpose.
template <class T>
void rotate_heads(T* x, const T* cosine, const T* sine, int64_t rows, int64_t stride, int64_t heads, int64_t width,
                  bool back, int32_t threads) {
    const int64_t half = width / 2;
#pragma omp parallel for num_threads(threads_for(rows * stride, threads)) schedule(static)
    for (int64_t n = 0; n < rows; ++n) {
        const T *c = cosine + n * width, *s = sine + n * width;
        for (int64_t h = 0; h < heads; ++h) {
            T *low = x + n * stride + h * width, *high = low + half;
            if (back) {
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    const float a = widen(low[i]), b = widen(high[i]);
                    round_to(a * widen(c[i]) + b * widen(s[i + half]), low[i]);
                    round_to(b * widen(c[i + half]) - a * widen(s[i]), high[i]);
                }
            } else {
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    const float a = widen(low[i]), b = widen(high[i]);
                    round_to(a * widen(c[i]) - b * widen(s[i]), low[i]);
                    round_to(b * widen(c[i + half]) + a * widen(s[i + half]), high[i]);
                }
            }
        }
    }
}

// With r = 1 / sqrt(mean(x^2) + epsilon) and y = x r w: adds to `grad` [N, D] the gradient of x,
// r (g w - x r mean(g w x r)), where g is the gradient of y; grad_weight [D] = sum of g x r.
template <class T>
void rms_norm_grad(const T* x, const T* weight, const T* given, T* grad, float* grad_weight, int64_t rows, int64_t width,
                   float epsilon, int32_t threads) {
    threads = threads_for(rows * width, threads);
    std::vector<float> parts(static_cast<size_t>(threads) * width, 0.0f);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int32_t thread = 0; thread < threads; ++thread) {
        float* part = parts.data() + thread * width;
        std::vector<float> normed(width), pulled(width);
        for (int64_t n = rows * thread / threads; n < rows * (thread + 1) / threads; ++n) {
            const T *row = x + n * width, *g = given + n * width;
            T* out = grad + n * width;
            float squares = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < width; ++i) squares += widen(row[i]) * widen(row[i]);
            const float scale = 1.0f / std::sqrt(squares / static_cast<float>(width) + epsilon);
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < width; ++i) {
                const float y = widen(row[i]) * scale, pull = widen(g[i]);
                part[i] += pull * y;
                normed[i] = y;
                pulled[i] = pull * widen(weight[i]);
                dot += pulled[i] * y;
            }
            dot /= static_cast<float>(width);
#pragma omp simd
            for (int64_t i = 0; i < width; ++i)
                round_to(widen(out[i]) + scale * (pulled[i] - normed[i] * dot), out[i]);
        }
    }
    for (int64_t i = 0; i < width; ++i) {
        float sum = 0.0f;
        for (int32_t thread = 0; thread < threads; ++thread) sum += parts[thread * width + i];
        grad_weight[i] = sum;
    }
}

// 1 / (1 + exp(-x)); exp_of sees no positive number.
inline float sigmoid(float x) {
    const float small = exp_of(-std::fabs(x));
    return (x < 0.0f ? small : 1.0f) / (1.0f + small);
}

// out [N, F] = silu(gate) * up, of joint [N, 2 F].
template <class T>
void gate(const T* joint, T* out, int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads_for(rows * width, threads)) schedule(static)
    for (int64_t n = 0; n < rows; ++n) {
        const T *gates = joint + 2 * n * width, *ups = gates + width;
        T* row = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const float g = widen(gates[i]);
            round_to(g * sigmoid(g) * widen(ups[i]), row[i]);
        }
    }
}

// In place: joint becomes its gradient, and the gradient [N, F] of the gate's output becomes that output.
template <class T>
void gate_grad(T* joint, T* given, int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads_for(rows * width, threads)) schedule(static)
    for (int64_t n = 0; n < rows; ++n) {
        T *gates = joint + 2 * n * width, *ups = gates + width, *row = given + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const float g = widen(gates[i]), u = widen(ups[i]), pull = widen(row[i]);
            const float part = sigmoid(g), silu = g * part;
            round_to(pull * u * (part + silu * (1.0f - part)), gates[i]);
            round_to(pull * silu, ups[i]);
            round_to(silu * u, row[i]);
        }
    }
}

constexpr float LOWEST = -1e4f;  // as in models/forward.py: no weight, and not a number that 0 times it would be NaN

// Log-probability of each row's target and the row's entropy under softmax(logits / divisor); `normaliser` is the
// logarithm of the sum of exponentials.
template <class T>
void token_logps(const T* logits, const int64_t* target, float* logp, float* entropy, float* normaliser, int64_t rows,
                 int64_t vocabulary, float divisor, int32_t threads) {
    const float by = 1.0f / divisor;
#pragma omp parallel for num_threads(threads_for(rows * vocabulary, threads)) schedule(static)
    for (int64_t m = 0; m < rows; ++m) {
        const T* row = logits + m * vocabulary;
        float most = -INFINITY, sum = 0.0f, moment = 0.0f, odd = 0.0f;
#pragma omp simd reduction(max : most) reduction(+ : odd)
        for (int64_t v = 0; v < vocabulary; ++v) {
            const float x = widen(row[v]);
            most = std::max(most, x);
            odd += x != x ? 1.0f : 0.0f;
        }
        if (odd > 0.0f) most = NAN;
#pragma omp simd reduction(+ : sum, moment)
        for (int64_t v = 0; v < vocabulary; ++v) {
            const float x = std::max((widen(row[v]) - most) * by, LOWEST), weight = exp_of(x);
            sum += weight;
            moment += weight * x;
        }
        const float log_sum = std::log(sum);
        normaliser[m] = odd > 0.0f ? NAN : most * by + log_sum;
        logp[m] = odd > 0.0f ? NAN : std::max((widen(row[target[m]]) - most) * by, LOWEST) - log_sum;
        entropy[m] = odd > 0.0f ? NAN : log_sum - moment / sum;
    }
}

// In place: logits become their gradient, grad (one_hot(target) - softmax(logits / divisor)) / divisor.
template <class T>
void token_logps_grad(T* logits, const int64_t* target, const float* normaliser, const float* grad, int64_t rows,
                      int64_t vocabulary, float divisor, int32_t threads) {
    const float by = 1.0f / divisor;
#pragma omp parallel for num_threads(threads_for(rows * vocabulary, threads)) schedule(static)
    for (int64_t m = 0; m < rows; ++m) {
        T* row = logits + m * vocabulary;
        const float pull = grad[m] * by, base = normaliser[m];
        const float at_target = pull * (1.0f - exp_of(std::min(0.0f, widen(row[target[m]]) * by - base)));
#pragma omp simd
        for (int64_t v = 0; v < vocabulary; ++v)
            round_to(-pull * exp_of(std::min(0.0f, widen(row[v]) * by - base)), row[v]);
        round_to(at_target, row[target[m]]);
    }
}

// Sum of squares; float32 within a stretch, float64 over them.
template <class T>
void sum_squares(const T* x, int64_t count, double* total, int32_t threads) {
    constexpr int64_t STRETCH = 4096;
    const int64_t stretches = (count + STRETCH - 1) / STRETCH;
    std::vector<float> parts(stretches);
#pragma omp parallel for num_threads(threads_for(count, threads)) schedule(static)
    for (int64_t s = 0; s < stretches; ++s) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = s * STRETCH; i < std::min(count, (s + 1) * STRETCH); ++i) sum += widen(x[i]) * widen(x[i]);
        parts[s] = sum;
    }
    *total = 0.0;
    for (const float part : parts) *total += part;
}

}  // namespace

extern "C" {

// One step of AdamW, with the numbers that are the same for all weights.
struct AdamW {
    float lr, beta1, beta2, epsilon, decay;  // decay: what a weight is multiplied with first, 1 - lr * weight_decay
    float scale;                             // of the gradient
    float correction1, correction2;          // 1 - beta1^t, sqrt(1 - beta2^t)
};

}  // extern "C"

namespace {

// As torch.optim.AdamW. `copy` (may be null) gets the new weights in bf16.
template <class T>
void adamw(const AdamW& a, float* weight, float* first, float* second, const T* grad, bf16* copy, int64_t count,
           int32_t threads) {
    const float size = a.lr / a.correction1;
#pragma omp parallel for simd num_threads(threads_for(count, threads)) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        const float g = widen(grad[i]) * a.scale;
        first[i] += (g - first[i]) * (1.0f - a.beta1);
        second[i] = a.beta2 * second[i] + (1.0f - a.beta2) * g * g;
        weight[i] = weight[i] * a.decay - size * first[i] / (std::sqrt(second[i]) / a.correction2 + a.epsilon);
        if (copy) round_to(weight[i], copy[i]);
    }
}

}  // namespace

#define FOR_BOTH(make) make(float, float) make(bf16, bf16)

#define ROTATE(T, NAME)                                                                                              \
    void rotate_heads_##NAME(T* x, const T* cosine, const T* sine, int64_t rows, int64_t stride, int64_t heads,      \
                             int64_t width, int32_t back, int32_t threads) {                                         \
        rotate_heads(x, cosine, sine, rows, stride, heads, width, back != 0, threads);                               \
    }
#define NORM_GRAD(T, NAME)                                                                                           \
    void rms_norm_grad_##NAME(const T* x, const T* weight, const T* given, T* grad, float* grad_weight, int64_t rows,\
                              int64_t width, float epsilon, int32_t threads) {                                       \
        rms_norm_grad(x, weight, given, grad, grad_weight, rows, width, epsilon, threads);                           \
    }
#define GATE(T, NAME)                                                                                                \
    void gate_##NAME(const T* joint, T* out, int64_t rows, int64_t width, int32_t threads) {                         \
        gate(joint, out, rows, width, threads);                                                                      \
    }
#define GATE_GRAD(T, NAME)                                                                                           \
    void gate_grad_##NAME(T* joint, T* given, int64_t rows, int64_t width, int32_t threads) {                        \
        gate_grad(joint, given, rows, width, threads);                                                               \
    }
#define LOGPS(T, NAME)                                                                                               \
    void token_logps_##NAME(const T* logits, const int64_t* target, float* logp, float* entropy, float* normaliser,  \
                            int64_t rows, int64_t vocabulary, float divisor, int32_t threads) {                      \
        token_logps(logits, target, logp, entropy, normaliser, rows, vocabulary, divisor, threads);                  \
    }
#define LOGPS_GRAD(T, NAME)                                                                                          \
    void token_logps_grad_##NAME(T* logits, const int64_t* target, const float* normaliser, const float* grad,       \
                                 int64_t rows, int64_t vocabulary, float divisor, int32_t threads) {                 \
        token_logps_grad(logits, target, normaliser, grad, rows, vocabulary, divisor, threads);                      \
    }
#define SUM_SQUARES(T, NAME)                                                                                         \
    void sum_squares_##NAME(const T* x, int64_t count, double* total, int32_t threads) {                             \
        sum_squares(x, count, total, threads);                                                                       \
    }
#define ADAMW(T, NAME)                                                                                               \
    void adamw_##NAME(const AdamW* a, float* weight, float* first, float* second, const T* grad, bf16* copy,         \
                      int64_t count, int32_t threads) {                                                              \
        adamw(*a, weight, first, second, grad, copy, count, threads);                                                \
    }

extern "C" {

FOR_BOTH(ROTATE)
FOR_BOTH(NORM_GRAD)
FOR_BOTH(GATE)
FOR_BOTH(GATE_GRAD)
FOR_BOTH(LOGPS)
FOR_BOTH(LOGPS_GRAD)
FOR_BOTH(SUM_SQUARES)
FOR_BOTH(ADAMW)

// out [D, N] = x [N, D], turned. Products read a matrix that lies the right way twice as fast.
void turn_bf16(const bf16* x, bf16* out, int64_t rows, int64_t width, int32_t threads) {
    constexpr int64_t SQUARE = 8, BAND = 64;  // a band of rows is written as whole cache lines
#pragma omp parallel for num_threads(threads_for(rows * width, threads)) schedule(static)
    for (int64_t band = 0; band < (rows + BAND - 1) / BAND; ++band) {
        const int64_t last = std::min(rows, (band + 1) * BAND);
        for (int64_t j = 0; j < width; j += SQUARE)
            for (int64_t i = band * BAND; i < last; i += SQUARE) {
                if (i + SQUARE <= last && j + SQUARE <= width) {
                    turn_square(x + i * width + j, width, out + j * rows + i, rows);
                    continue;
                }
                for (int64_t row = i; row < std::min(last, i + SQUARE); ++row)
                    for (int64_t column = j; column < std::min(width, j + SQUARE); ++column)
                        out[column * rows + row] = x[row * width + column];
            }
    }
}

}  // extern "C"
