// Attention of one layer in a decode step: head norms, rotary positions, the new key and value, and a softmax over the
// prompt and the answer of each sample. S rows of the batch, H query heads, Hk key heads, E width of a head.

#include "lanes.h"
#include "numbers.h"

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
    int32_t threads;
};

}  // extern "C"

namespace {

constexpr int64_t MOST_TOGETHER = 3;  // heads whose sums stay in registers

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

// One sample's heads and the scratch memory of a thread. Keys and values of all heads of a token lie together and are
// read together, in the order of memory.
struct Sample {
    int64_t heads, key_heads, width, room;
    float scaling;
    float *queries;  // [H, E]
    float *scores;   // [H, room]
    float *sums;     // [H, E]
    float *wide;     // [LANES, Hk, E]: a block of keys or values
    float *totals;   // [H]

    int64_t stride() const { return key_heads * width; }
    int64_t shared() const { return heads / key_heads; }
    // Heads from this one on that read the same key head, as many as have room in registers.
    int64_t num_together(int64_t head) const { return std::min(MOST_TOGETHER, shared() - head % shared()); }
};

// Scores of NUM queries [NUM, E] of one key head with LANES keys that lie `stride` apart; each key is read once.
template <int WIDTH, int NUM>
void score_block(const Sample& a, const float* queries, const float* keys, float* scores) {
    Lanes sums[NUM][LANES];
    for (int64_t k = 0; k < LANES; ++k) {
        const float* key = keys + k * a.stride();
        for (int n = 0; n < NUM; ++n) sums[n][k] = lanes(queries + n * WIDTH) * lanes(key);
        for (int i = LANES; i < WIDTH; i += LANES)
            for (int n = 0; n < NUM; ++n) sums[n][k] += lanes(queries + n * WIDTH + i) * lanes(key + i);
    }
    for (int n = 0; n < NUM; ++n) store(sum_of_each(sums[n]) * a.scaling, scores + n * a.room);
}

// Adds `count` values that lie `stride` apart, weighted, to the sums [NUM, E] of one key head; each is read once.
template <int WIDTH, int NUM>
void add_block(const Sample& a, const float* weights, const float* values, int64_t count, float* into) {
    Lanes sums[NUM][WIDTH / LANES];  // in registers
    std::memcpy(sums, into, sizeof sums);
    for (int64_t k = 0; k < count; ++k)
        for (int n = 0; n < NUM; ++n)
            for (int i = 0; i < WIDTH / LANES; ++i)
                sums[n][i] += weights[n * a.room + k] * lanes(values + k * a.stride() + i * LANES);
    std::memcpy(into, sums, sizeof sums);
}

// scores[h][at ...] of the queries with `count` keys [count, Hk, E]; written in whole blocks of LANES.
template <class T, int WIDTH>
void score(const Sample& a, const T* keys, int64_t count, int64_t at) {
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t block = std::min(LANES, count - first);
        widen_all(keys + first * a.stride(), block * a.stride(), a.wide);
        for (int64_t h = 0, n = 1; h < a.heads; h += n) {
            const float *query = a.queries + h * a.width, *key = a.wide + h / a.shared() * a.width;
            float* into = a.scores + h * a.room + at + first;
            if constexpr (WIDTH > 0) {
                n = a.num_together(h);
                const auto of = n == 3 ? score_block<WIDTH, 3> : n == 2 ? score_block<WIDTH, 2> : score_block<WIDTH, 1>;
                of(a, query, key, into);
            } else {
                for (int64_t k = 0; k < block; ++k) {
                    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                    for (int64_t i = 0; i < a.width; ++i) sum += query[i] * key[k * a.stride() + i];
                    into[k] = sum * a.scaling;
                }
            }
        }
    }
}

// Adds `count` values [count, Hk, E], weighted with scores[h][at ...], to the sums.
template <class T, int WIDTH>
void add_values(const Sample& a, const T* values, int64_t count, int64_t at) {
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t block = std::min(LANES, count - first);
        widen_all(values + first * a.stride(), block * a.stride(), a.wide);
        for (int64_t h = 0, n = 1; h < a.heads; h += n) {
            const float *weight = a.scores + h * a.room + at + first, *value = a.wide + h / a.shared() * a.width;
            float* into = a.sums + h * a.width;
            if constexpr (WIDTH > 0) {
                n = a.num_together(h);
                const auto of = n == 3 ? add_block<WIDTH, 3> : n == 2 ? add_block<WIDTH, 2> : add_block<WIDTH, 1>;
                of(a, weight, value, block, into);
            } else {
                for (int64_t k = 0; k < block; ++k)
#pragma omp simd
                    for (int64_t i = 0; i < a.width; ++i) into[i] += weight[k] * value[k * a.stride() + i];
            }
        }
    }
}

// Weights exp(score - largest) in place of scores; returns their sum. There is room for whole blocks.
float to_weights(float* scores, int64_t count) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    std::fill(scores + count, scores + whole, -INFINITY);
    Lanes most = lanes(scores), sums = {};
    for (int64_t i = LANES; i < whole; i += LANES) most = larger(most, lanes(scores + i));
    const float largest = largest_of(most);
    for (int64_t i = 0; i < whole; i += LANES) {
#pragma omp simd
        for (int64_t j = i; j < i + LANES; ++j) scores[j] = exp_of(scores[j] - largest);
        sums += lanes(scores + i);
    }
    return sum_of(sums);
}

template <class T, int WIDTH>
void attend_one(const Attention& a, int64_t s, int64_t room, float* scratch) {
    const int64_t width = a.width, stride = a.key_heads * width;
    Sample sample{a.heads, a.key_heads, width, room, a.scaling};
    sample.queries = scratch;
    sample.sums = sample.queries + a.heads * width;
    sample.wide = sample.sums + a.heads * width;
    sample.scores = sample.wide + LANES * stride;
    sample.totals = sample.scores + a.heads * room;
    T* turned = reinterpret_cast<T*>(sample.totals + a.heads);  // [E]
    T* normed = turned + width;
    const T* joint = static_cast<const T*>(a.joint) + s * (a.heads + 2 * a.key_heads) * width;
    const T* cosine = static_cast<const T*>(a.cosine) + s * width;
    const T* sine = static_cast<const T*>(a.sine) + s * width;
    for (int64_t h = 0; h < a.heads; ++h) {
        rotate(joint + h * width, static_cast<const T*>(a.query_norm), a.query_epsilon, cosine, sine, normed, turned, width);
        widen_all(turned, width, sample.queries + h * width);
    }
    const int64_t length = a.answer_length[s], before = a.prompt_length[s];
    T* answer_keys = static_cast<T*>(a.answer_keys) + s * a.answer_capacity * stride;
    T* answer_values = static_cast<T*>(a.answer_values) + s * a.answer_capacity * stride;
    for (int64_t h = 0; h < a.key_heads; ++h)
        rotate(joint + (a.heads + h) * width, static_cast<const T*>(a.key_norm), a.key_epsilon, cosine, sine, normed,
               answer_keys + length * stride + h * width, width);
    std::memcpy(answer_values + length * stride, joint + (a.heads + a.key_heads) * width, stride * sizeof(T));

    const int64_t hidden = a.window > 0 ? std::max<int64_t>(0, before + length + 1 - a.window) : 0;
    const int64_t first_prompt = std::min(hidden, before), first_answer = std::max<int64_t>(0, hidden - before);
    const int64_t num_prompt = before - first_prompt, num_answer = length + 1 - first_answer;
    const int64_t prompt_at = (a.prompt_row[s] * a.prompt_capacity + first_prompt) * stride;
    score<T, WIDTH>(sample, static_cast<const T*>(a.prompt_keys) + prompt_at, num_prompt, 0);
    score<T, WIDTH>(sample, answer_keys + first_answer * stride, num_answer, num_prompt);
    for (int64_t h = 0; h < a.heads; ++h) sample.totals[h] = to_weights(sample.scores + h * room, num_prompt + num_answer);
    std::fill(sample.sums, sample.sums + a.heads * width, 0.0f);
    add_values<T, WIDTH>(sample, static_cast<const T*>(a.prompt_values) + prompt_at, num_prompt, 0);
    add_values<T, WIDTH>(sample, answer_values + first_answer * stride, num_answer, num_prompt);
    T* out = static_cast<T*>(a.out) + s * a.heads * width;
    for (int64_t h = 0; h < a.heads; ++h) {
        const float scale = 1.0f / sample.totals[h];
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) round_to(sample.sums[h * width + i] * scale, out[h * width + i]);
    }
}

template <class T>
void attend(const Attention& a) {
    int64_t room = 1;
    for (int64_t s = 0; s < a.rows; ++s) room = std::max(room, a.prompt_length[s] + a.answer_length[s] + 1);
    room = (room + 2 * LANES - 1) / LANES * LANES;  // and for a block that begins with the last key
    const int64_t needed = a.heads * (2 * a.width + room + 1) + LANES * a.key_heads * a.width + 2 * a.width;
#pragma omp parallel num_threads(a.threads)
    {
        static thread_local Scratch memory;
        float* scratch = memory.of<float>(needed);
#pragma omp for schedule(dynamic, 1)
        for (int64_t s = 0; s < a.rows; ++s) {
            if (a.width == 64)
                attend_one<T, 64>(a, s, room, scratch);
            else if (a.width == 128)
                attend_one<T, 128>(a, s, room, scratch);
            else
                attend_one<T, 0>(a, s, room, scratch);
        }
    }
}

}  // namespace

extern "C" {

void attend_float(const Attention* a) { attend<float>(*a); }

void attend_bf16(const Attention* a) { attend<bf16>(*a); }

}  // extern "C"
