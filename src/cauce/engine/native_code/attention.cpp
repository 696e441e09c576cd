// Attention of one layer in a decode step: head norms, rotary positions, the new key and value, and a softmax over the
// prompt and the answer of each sample. S rows of the batch, H query heads, Hk key heads, R = H / Hk, E width of a head.

#include <type_traits>
#include <vector>

#include "numbers.h"
#include "tiles.h"

extern "C" {

// One layer of a decode step. Pointers to T unless said.
struct Attention {
    const void* joint;          // [S, (H + 2 Hk) E]: queries, keys, values before norms and positions
    const void* cosine;         // [S, E]
    const void* sine;           // [S, E]
    const void* query_norm;     // [E], or null: heads are not normalised
    const void* key_norm;       // [E], or null
    void* answer_keys;          // [slots, answer_capacity, Hk, E]; row s of the batch is slot s
    void* answer_values;
    const void* prompt_keys;    // [prompts, prompt_capacity, Hk, E]
    const void* prompt_values;
    const int64_t* answer_length;  // [S]: tokens before this one; its key and value are written there
    const int64_t* prompt_length;  // [S]
    const int64_t* prompt_row;     // [S]
    void* out;                  // [S, H E]
    int64_t rows, heads, key_heads, width, answer_capacity, prompt_capacity;
    int64_t window;             // 0: none; else only so many last positions are attended to
    float scaling, query_epsilon, key_epsilon;
    int32_t threads, in_tiles;
};

}  // extern "C"

namespace {

constexpr int64_t BLOCK_KEYS = 16;

// Rotated by its position, and rounded as a model of this dtype rounds it.
template <class T>
void rotate(const T* x, const T* norm, float epsilon, const T* cosine, const T* sine, T* normed, T* out, int64_t width) {
    if (norm != nullptr) {
        norm_row(x, norm, normed, width, epsilon);
        x = normed;
    }
    const int64_t half = width / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float low = widen(x[i]), high = widen(x[i + half]);
        round_to(low * widen(cosine[i]) - high * widen(sine[i]), out[i]);
        round_to(high * widen(cosine[i + half]) + low * widen(sine[i + half]), out[i + half]);
    }
}

// Scores of R queries [R, E] with `count` keys that lie `stride` apart; scores[r] has room for all of them.
template <class T, int WIDTH>
void score(const float* queries, int64_t shared, const T* keys, int64_t stride, int64_t count, float scaling,
           float* scores, int64_t room, float* wide, int64_t given_width) {
    const int64_t width = WIDTH > 0 ? WIDTH : given_width;
    for (int64_t first = 0; first < count; first += BLOCK_KEYS) {
        const int64_t block = std::min(BLOCK_KEYS, count - first);
        for (int64_t k = 0; k < block; ++k) {
            const T* key = keys + (first + k) * stride;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) wide[k * width + i] = widen(key[i]);
        }
        for (int64_t r = 0; r < shared; ++r) {
            const float* query = queries + r * width;
            for (int64_t k = 0; k < block; ++k) {
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < width; ++i) sum += query[i] * wide[k * width + i];
                scores[r * room + first + k] = sum * scaling;
            }
        }
    }
}

#if HAS_TILES

// As `score`, sixteen keys at a time; there are at least so many at `keys`, though fewer may be asked for.
void score_in_tiles(const bf16* queries, int64_t shared, const bf16* keys, int64_t stride, int64_t count, float scaling,
                    float* scores, int64_t room, int64_t width) {
    // The right side of the product, a column for each query. What is in the other columns is not read.
    alignas(64) uint32_t pairs[MOST_TILE_STEPS][TILE_ROWS][16];
    alignas(64) float sums[TILE_ROWS][16];
    const int64_t steps = width / TILE_K;
    for (int64_t r = 0; r < shared; ++r) {
        uint32_t query[MOST_TILE_STEPS * TILE_ROWS];
        std::memcpy(query, queries + r * width, width * sizeof(bf16));
        for (int64_t i = 0; i < width / 2; ++i) pairs[i / TILE_ROWS][i % TILE_ROWS][r] = query[i];
    }
    for (int64_t from = 0; from < count; from += TILE_ROWS) {
        const int64_t first = std::max<int64_t>(0, std::min(from, count - TILE_ROWS));  // the last are read with others
        _tile_zero(0);
        for (int64_t k = 0; k < steps; ++k) {
            _tile_loadd(1, keys + first * stride + k * TILE_K, stride * 2);
            _tile_loadd(2, pairs[k], 64);
            _tile_dpbf16ps(0, 1, 2);
        }
        _tile_stored(0, sums, 64);
        const int64_t block = std::min(TILE_ROWS, count - first);
        for (int64_t r = 0; r < shared; ++r)
            for (int64_t k = 0; k < block; ++k) scores[r * room + first + k] = sums[k][r] * scaling;
    }
}

#endif

// Adds weights[r] times `count` values that lie `stride` apart to sums [R, E].
template <class T, int WIDTH>
void add_values(const float* weights, int64_t room, int64_t shared, const T* values, int64_t stride, int64_t count,
                float* sums, float* wide, int64_t given_width) {
    const int64_t width = WIDTH > 0 ? WIDTH : given_width;
    for (int64_t first = 0; first < count; first += BLOCK_KEYS) {
        const int64_t block = std::min(BLOCK_KEYS, count - first);
        for (int64_t k = 0; k < block; ++k) {
            const T* value = values + (first + k) * stride;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) wide[k * width + i] = widen(value[i]);
        }
        for (int64_t r = 0; r < shared; ++r) {
            const float* weight = weights + r * room + first;
            if constexpr (WIDTH > 0) {  // in an array of known size, which stays in registers
                float sum[WIDTH];
                std::memcpy(sum, sums + r * WIDTH, sizeof sum);
                for (int64_t k = 0; k < block; ++k)
#pragma omp simd
                    for (int64_t i = 0; i < WIDTH; ++i) sum[i] += weight[k] * wide[k * WIDTH + i];
                std::memcpy(sums + r * WIDTH, sum, sizeof sum);
            } else {
                for (int64_t k = 0; k < block; ++k)
#pragma omp simd
                    for (int64_t i = 0; i < width; ++i) sums[r * width + i] += weight[k] * wide[k * width + i];
            }
        }
    }
}

// Weights exp(score - largest) in place of scores; returns their sum.
float to_weights(float* scores, int64_t count) {
    float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, scores[i]);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
        scores[i] = exp_of(scores[i] - largest);
        sum += scores[i];
    }
    return sum;
}

template <class T, int WIDTH>
void attend_one(const Attention& a, int64_t s, int64_t h, int64_t room, float* scratch) {
    const int64_t width = a.width, shared = a.heads / a.key_heads, stride = a.key_heads * width;
    float* queries = scratch;                  // [R, E]
    float* sums = queries + shared * width;    // [R, E]
    float* wide = sums + shared * width;       // [BLOCK_KEYS, E]
    float* scores = wide + BLOCK_KEYS * width; // [R, room]
    T* turned = reinterpret_cast<T*>(scores + shared * room);  // [R, E]
    T* normed = turned + shared * width;
    const T* joint = static_cast<const T*>(a.joint) + s * (a.heads + 2 * a.key_heads) * width;
    const T* cosine = static_cast<const T*>(a.cosine) + s * width;
    const T* sine = static_cast<const T*>(a.sine) + s * width;
    for (int64_t r = 0; r < shared; ++r) {
        T* query = turned + r * width;
        rotate(joint + (h * shared + r) * width, static_cast<const T*>(a.query_norm), a.query_epsilon, cosine, sine,
               normed, query, width);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) queries[r * width + i] = widen(query[i]);
    }
    const int64_t length = a.answer_length[s], before = a.prompt_length[s];
    T* answer_keys = static_cast<T*>(a.answer_keys) + s * a.answer_capacity * stride + h * width;
    T* answer_values = static_cast<T*>(a.answer_values) + s * a.answer_capacity * stride + h * width;
    rotate(joint + (a.heads + h) * width, static_cast<const T*>(a.key_norm), a.key_epsilon, cosine, sine, normed,
           answer_keys + length * stride, width);
    std::memcpy(answer_values + length * stride, joint + (a.heads + a.key_heads + h) * width, width * sizeof(T));

    const int64_t hidden = a.window > 0 ? std::max<int64_t>(0, before + length + 1 - a.window) : 0;
    const int64_t first_prompt = std::min(hidden, before), first_answer = std::max<int64_t>(0, hidden - before);
    const int64_t num_prompt = before - first_prompt, num_answer = length + 1 - first_answer;
    const int64_t prompt_at = (a.prompt_row[s] * a.prompt_capacity + first_prompt) * stride + h * width;
    const T* prompt_keys = static_cast<const T*>(a.prompt_keys) + prompt_at;
    const T* prompt_values = static_cast<const T*>(a.prompt_values) + prompt_at;
    answer_keys += first_answer * stride;
    answer_values += first_answer * stride;

    const auto score_all = [&](const T* keys, int64_t count, [[maybe_unused]] int64_t left, float* into) {
#if HAS_TILES
        if constexpr (std::is_same_v<T, bf16>) {
            if (a.in_tiles && shared <= 16 && width % TILE_K == 0 && width <= MOST_TILE_STEPS * TILE_K && left >= TILE_ROWS)
                return score_in_tiles(turned, shared, keys, stride, count, a.scaling, into, room, width);
        }
#endif
        score<T, WIDTH>(queries, shared, keys, stride, count, a.scaling, into, room, wide, width);
    };
    score_all(prompt_keys, num_prompt, a.prompt_capacity - first_prompt, scores);
    score_all(answer_keys, num_answer, a.answer_capacity - first_answer, scores + num_prompt);
    std::fill(sums, sums + shared * width, 0.0f);
    float total[64];
    for (int64_t r = 0; r < shared; ++r) total[r] = to_weights(scores + r * room, num_prompt + num_answer);
    add_values<T, WIDTH>(scores, room, shared, prompt_values, stride, num_prompt, sums, wide, width);
    add_values<T, WIDTH>(scores + num_prompt, room, shared, answer_values, stride, num_answer, sums, wide, width);
    T* out = static_cast<T*>(a.out) + (s * a.heads + h * shared) * width;
    for (int64_t r = 0; r < shared; ++r) {
        const float scale = 1.0f / total[r];
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) round_to(sums[r * width + i] * scale, out[r * width + i]);
    }
}

template <class T>
void attend(const Attention& a) {
    int64_t room = 1;
    for (int64_t s = 0; s < a.rows; ++s) room = std::max(room, a.prompt_length[s] + a.answer_length[s] + 1);
    const int64_t shared = a.heads / a.key_heads;
    const size_t needed = shared * (2 * a.width + room) + BLOCK_KEYS * a.width + (shared + 1) * a.width;
#pragma omp parallel num_threads(a.threads)
    {
        static thread_local std::vector<float> scratch;
        [[maybe_unused]] const Tiles tiles;
        if (scratch.size() < needed) scratch.resize(needed);
#pragma omp for schedule(dynamic, 1)
        for (int64_t s = 0; s < a.rows; ++s) {
            for (int64_t h = 0; h < a.key_heads; ++h) {
                if (a.width == 64)
                    attend_one<T, 64>(a, s, h, room, scratch.data());
                else if (a.width == 128)
                    attend_one<T, 128>(a, s, h, room, scratch.data());
                else
                    attend_one<T, 0>(a, s, h, room, scratch.data());
            }
        }
    }
}

}  // namespace

extern "C" {

void attend_float(const Attention* a) { attend<float>(*a); }

void attend_bf16(const Attention* a) { attend<bf16>(*a); }

}  // extern "C"
