// Attention over a packed row, forward and backward: every answer sees its prompt and itself, and nothing else.
//
// Queries go in blocks of 32, over time and over the heads that share a key head; keys in blocks of 32 and tiles of 16.
// Scores are held turned, keys by queries, so that a softmax is plain vector code over queries. The scores of one
// block of queries with all their keys are held at once; those of other blocks never exist, and no mask does.
// N tokens, H query heads, Hk key heads, R = H / Hk, E width of a head, F that width in whole blocks.

#include <type_traits>
#include <vector>

#include "lanes.h"
#include "numbers.h"
#include "tiles.h"

extern "C" {

// Pointers to T unless said.
struct PackedAttention {
    const void* joint;       // [N + 32, (H + 2 Hk) E]: queries and keys in their positions, values
    void* out;               // [N, H E]
    float* log_sum;          // [N, H]: of the exponentials of each query's scores
    const void* grad_out;    // [N, H E]; what follows is for the backward pass
    void* grad_joint;        // [N, (H + 2 Hk) E]
    const int64_t* prompts;  // [G, 2]: start and length
    const int64_t* answers;  // [A, 3]: start, length and prompt, by prompt in order
    int64_t num_prompts, num_answers, heads, key_heads, width;
    int64_t window;          // 0: none; else only so many last positions are attended to
    float scaling;
    int32_t threads, in_tiles;
};

}  // extern "C"

namespace {

constexpr int64_t Q = 32, KEYS = 32, SIDE = 16, SQUARE = SIDE * SIDE, SLAB = 8;  // a slab: blocks of one task
constexpr int64_t LEAST_TASKS = 16;  // of a backward pass; a fixed number, so that sums do not depend on threads

// Products in tiles of AMX. Panels hold pairs of inputs: [inputs / 2][16][2].
struct InTiles {
    using Row = bf16;
    using Panel = uint32_t;
    static constexpr int64_t PANEL = SIDE * SIDE;  // words of 32 inputs

    // sums [2][16][16] (+)= rows [16, inputs] times two panels [inputs, 16].
    static void multiply(const bf16* rows, int64_t stride, int64_t inputs, const uint32_t* left, const uint32_t* right,
                         float* sums, bool add) {
#if HAS_TILES
        if (add) {
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + SQUARE, 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
        }
        for (int64_t k = 0; k < inputs / TILE_K; ++k) {
            _tile_loadd(2, rows + k * TILE_K, stride * 2);
            _tile_loadd(3, left + k * PANEL, 64);
            _tile_loadd(4, right + k * PANEL, 64);
            _tile_dpbf16ps(0, 2, 3);
            _tile_dpbf16ps(1, 2, 4);
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + SQUARE, 64);
#endif
    }

    // A panel [width, 16] from 16 rows, whose pairs change places as words; null: a row of zeros.
    static void turn(const bf16* const* rows, int64_t width, uint32_t* panel) {
        for (int64_t from = 0; from < width; from += TILE_K) {
            Lanes square[SIDE] = {};
            for (int64_t i = 0; i < SIDE; ++i)
                if (rows[i]) std::memcpy(square + i, rows[i] + from, sizeof(Lanes));
            turn_square(square);
            std::memcpy(panel + from / 2 * SIDE, square, sizeof square);
        }
    }

    // Rows 2 p and 2 p + 1 of panels [F / 16][32, 16].
    static void put_rows(const bf16* even, const bf16* odd, int64_t width, int64_t p, uint32_t* panels) {
        for (int64_t from = 0; from < width; from += SIDE)
#pragma omp simd
            for (int64_t j = 0; j < SIDE; ++j)
                panels[(from / SIDE) * PANEL + p * SIDE + j] =
                    (even ? even[from + j].bits : 0u) | static_cast<uint32_t>(odd ? odd[from + j].bits : 0u) << 16;
    }

    static void put_pair(const float* even, const float* odd, int64_t p, uint32_t* panel) {
#pragma omp simd
        for (int64_t j = 0; j < SIDE; ++j) {
            bf16 low, high;
            round_to(even[j], low);
            round_to(odd[j], high);
            panel[p * SIDE + j] = low.bits | static_cast<uint32_t>(high.bits) << 16;
        }
    }
};

// The same in vector code and float32. Panels: [inputs][16].
template <class T>
struct Plain {
    using Row = float;
    using Panel = float;
    static constexpr int64_t PANEL = 2 * SIDE * SIDE;

    template <class Any>
    static void multiply(const Any* rows, int64_t stride, int64_t inputs, const float* left, const float* right,
                         float* sums, bool add) {
        constexpr int64_t FEW = 4;  // rows at a time: their sums stay in registers
        for (int64_t from = 0; from < SIDE; from += FEW) {
            float low[FEW][SIDE], high[FEW][SIDE];
            for (int64_t r = 0; r < FEW; ++r)
                for (int64_t j = 0; j < SIDE; ++j) {
                    low[r][j] = add ? sums[(from + r) * SIDE + j] : 0.0f;
                    high[r][j] = add ? sums[SQUARE + (from + r) * SIDE + j] : 0.0f;
                }
            for (int64_t k = 0; k < inputs; ++k)
                for (int64_t r = 0; r < FEW; ++r) {
                    const float x = widen(rows[(from + r) * stride + k]);
#pragma omp simd
                    for (int64_t j = 0; j < SIDE; ++j) low[r][j] += x * left[k * SIDE + j];
#pragma omp simd
                    for (int64_t j = 0; j < SIDE; ++j) high[r][j] += x * right[k * SIDE + j];
                }
            for (int64_t r = 0; r < FEW; ++r)
                for (int64_t j = 0; j < SIDE; ++j) {
                    sums[(from + r) * SIDE + j] = low[r][j];
                    sums[SQUARE + (from + r) * SIDE + j] = high[r][j];
                }
        }
    }

    static void turn(const T* const* rows, int64_t width, float* panel) {
        for (int64_t i = 0; i < SIDE; ++i)
            for (int64_t e = 0; e < width; ++e) panel[e * SIDE + i] = rows[i] ? widen(rows[i][e]) : 0.0f;
    }

    static void put_rows(const T* even, const T* odd, int64_t width, int64_t p, float* panels) {
        for (int64_t e = 0; e < width; ++e) {
            float* at = panels + (e / SIDE) * PANEL + 2 * p * SIDE + e % SIDE;
            at[0] = even ? widen(even[e]) : 0.0f;
            at[SIDE] = odd ? widen(odd[e]) : 0.0f;
        }
    }

    static void put_pair(const float* even, const float* odd, int64_t p, float* panel) {
        std::memcpy(panel + 2 * p * SIDE, even, SIDE * sizeof(float));
        std::memcpy(panel + (2 * p + 1) * SIDE, odd, SIDE * sizeof(float));
    }
};

inline int64_t blocks_of(int64_t length) { return (length + KEYS - 1) / KEYS; }

// A run of keys: a prompt's, or an answer's own.
struct Keys {
    int64_t start;   // first token
    int64_t count;   // how many may be seen
    int64_t offset;  // position of the first
    int64_t block;   // where its turned blocks begin
};

struct Segment {
    int64_t start, length, before, block;  // before: tokens of its prompt, 0 for a prompt
    int64_t prompt_start, prompt_block;
};

// 16 rows [width], null ones left out, become columns of [width, KEYS].
template <class T>
void turn_few(const T* const* rows, int64_t width, T* columns) {
    if constexpr (std::is_same_v<T, bf16>)
        if (width % (2 * SIDE) == 0) {  // two of each row at a time, as words
            for (int64_t from = 0; from < width; from += 2 * SIDE) {
                Lanes square[SIDE] = {};
                for (int64_t k = 0; k < SIDE; ++k)
                    if (rows[k]) std::memcpy(square + k, rows[k] + from, sizeof(Lanes));
                turn_square(square);
                for (int64_t w = 0; w < SIDE; ++w) {
                    uint32_t words[SIDE];
                    std::memcpy(words, square + w, sizeof words);
                    T *even = columns + (from + 2 * w) * KEYS, *odd = even + KEYS;
#pragma omp simd
                    for (int64_t k = 0; k < SIDE; ++k) {
                        even[k].bits = static_cast<uint16_t>(words[k]);
                        odd[k].bits = static_cast<uint16_t>(words[k] >> 16);
                    }
                }
            }
            return;
        }
    for (int64_t k = 0; k < SIDE; ++k)
        for (int64_t e = 0; rows[k] && e < width; ++e) columns[e * KEYS + k] = rows[k][e];
}

// What is the same for all layers of a micro-batch, and turned keys or values [Hk][blocks][F][32].
template <class T>
struct Row {
    const PackedAttention& a;
    int64_t shared, width, full, stride, num_blocks = 0;
    std::vector<Segment> segments;  // prompts, then answers

    explicit Row(const PackedAttention& given) : a(given) {
        shared = a.heads / a.key_heads;
        width = a.width;
        full = (width + KEYS - 1) / KEYS * KEYS;
        stride = (a.heads + 2 * a.key_heads) * width;
        for (int64_t g = 0; g < a.num_prompts; ++g) {
            segments.push_back({a.prompts[2 * g], a.prompts[2 * g + 1], 0, num_blocks, 0, 0});
            num_blocks += blocks_of(a.prompts[2 * g + 1]);
        }
        for (int64_t n = 0; n < a.num_answers; ++n) {
            const Segment& prompt = segments[a.answers[3 * n + 2]];
            segments.push_back({a.answers[3 * n], a.answers[3 * n + 1], prompt.length, num_blocks, prompt.start, prompt.block});
            num_blocks += blocks_of(a.answers[3 * n + 1]);
        }
    }

    // A second thread would still be waking while one is done with a few tokens.
    int32_t threads() const { return num_blocks * KEYS * stride > 65536 ? a.threads : 1; }

    const T* joint(int64_t token, int64_t head) const {
        return static_cast<const T*>(a.joint) + token * stride + head * width;
    }
    const T* keys(int64_t token, int64_t h) const { return joint(token, a.heads + h); }
    const T* values(int64_t token, int64_t h) const { return joint(token, a.heads + a.key_heads + h); }

    // Turns the rows that `rows(token, h)` gives; run by all threads.
    template <class Rows>
    void turn(T* turned, Rows rows) const {
        const int64_t items = static_cast<int64_t>(segments.size()) * a.key_heads;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; ++item) {
            const Segment& segment = segments[item / a.key_heads];
            const int64_t h = item % a.key_heads;
            T* block = turned + (h * num_blocks + segment.block) * full * KEYS;
            std::memset(block, 0, blocks_of(segment.length) * full * KEYS * sizeof(T));
            for (int64_t t = 0; t < segment.length; t += SIDE) {
                const T* few[SIDE] = {};
                for (int64_t k = 0; k < SIDE && t + k < segment.length; ++k) few[k] = rows(segment.start + t + k, h);
                turn_few(few, width, block + t / KEYS * full * KEYS + t % KEYS);
            }
        }
    }
};

// 32 queries of one segment and key head: their places, and the keys that any of them sees.
template <class T>
struct Block {
    const Row<T>& row;
    const Segment& segment;
    int64_t h, first, count, earliest, latest;
    int32_t position[Q], from[Q];  // of each query, and the first position that it sees
    Keys runs[2];
    int64_t num_runs = 0;

    Block(const Row<T>& given, const Segment& of, int64_t head, int64_t number) : row(given), segment(of), h(head) {
        first = number * Q;
        count = std::min(Q, segment.length * row.shared - first);
        earliest = segment.before + first / row.shared;
        latest = segment.before + (first + count - 1) / row.shared;
        for (int64_t i = 0; i < Q; ++i) {
            position[i] = static_cast<int32_t>(segment.before + (first + std::min(i, count - 1)) / row.shared);
            from[i] = row.a.window > 0 ? static_cast<int32_t>(position[i] - row.a.window + 1) : 0;
        }
        if (segment.before > 0) add_run(segment.prompt_start, segment.before, 0, segment.prompt_block);
        add_run(segment.start, latest - segment.before + 1, segment.before, segment.block);
    }

    // Without the blocks that lie before everybody's window.
    void add_run(int64_t start, int64_t keys, int64_t offset, int64_t block) {
        int64_t hidden = 0;
        if (row.a.window > 0) hidden = std::max<int64_t>(0, earliest - row.a.window + 1 - offset) / KEYS * KEYS;
        if (hidden >= keys) return;
        runs[num_runs++] = {start + hidden, keys - hidden, offset + hidden, block + hidden / KEYS};
    }

    int64_t token(int64_t i) const { return segment.start + (first + i) / row.shared; }
    int64_t head(int64_t i) const { return h * row.shared + (first + i) % row.shared; }

    bool sees_all(const Keys& run, int64_t key) const {
        return key + SIDE <= run.count && run.offset + key + SIDE - 1 <= earliest &&
               (row.a.window == 0 || run.offset + key > latest - row.a.window);
    }
    // Puts `instead` where one of 16 queries does not see this key.
    void hide(const Keys& run, int64_t key, int64_t column, float* row_of_key, float instead) const {
        const int32_t at = key < run.count ? static_cast<int32_t>(run.offset + key) : INT32_MAX;
        const int32_t *last = position + column * SIDE, *first_seen = from + column * SIDE;
#pragma omp simd
        for (int64_t j = 0; j < SIDE; ++j)
            row_of_key[j] = (at <= last[j]) & (at >= first_seen[j]) ? row_of_key[j] : instead;
    }

    // Panels [2][E, 16] of what `rows(token, head)` gives for the queries.
    template <class Math, class Rows>
    void turn(Rows rows, typename Math::Panel* panels, int64_t column) const {
        const T* queries[Q] = {};
        for (int64_t i = 0; i < count; ++i) queries[i] = rows(token(i), head(i));
        for (int64_t c = 0; c < 2; ++c) Math::turn(queries + c * SIDE, row.width, panels + c * column);
    }

    // Sums [F / 16][2][16][16 queries], each query's divided by its number, to where `rows(token, head)` is.
    template <class Rows>
    void write(const float* sums, const float (*divisor)[SIDE], Rows rows) const {
        for (int64_t c = 0; c < 2 && c * SIDE < count; ++c)
            for (int64_t from = 0; from < row.width; from += SIDE) {
                Lanes square[SIDE];
                std::memcpy(square, sums + (from / SIDE * 2 + c) * SQUARE, sizeof square);
                turn_square(square);
                for (int64_t j = 0; j < SIDE && c * SIDE + j < count; ++j)
                    round_lanes(square[j] * (1.0f / divisor[c][j]), rows(token(c * SIDE + j), head(c * SIDE + j)) + from,
                                std::min(SIDE, row.width - from));
            }
    }
};

// Room of one thread, for several arrays at once.
struct Room {
    Scratch memory;
    char* base = nullptr;
    size_t used = 0;

    template <class Any>
    Any* take(int64_t count) {
        const size_t at = (used + 63) / 64 * 64;
        used = at + count * sizeof(Any);
        return reinterpret_cast<Any*>(base + at);
    }
    void reserve(size_t size) {
        base = memory.of<char>(size);
        used = 0;
    }
};

template <class T, class Math>
void forward_block(const Block<T>& block, const T* turned_values, Room& room) {
    using Panel = typename Math::Panel;
    const Row<T>& row = block.row;
    const int64_t column = (row.width + KEYS - 1) / KEYS * Math::PANEL;
    int64_t keys = 0;
    for (int64_t n = 0; n < block.num_runs; ++n) keys += blocks_of(block.runs[n].count) * KEYS;
    room.reserve(2 * column * sizeof(Panel) + (keys + row.full) * Q * sizeof(float) + keys * Q * sizeof(Panel) + 4096);
    Panel* queries = room.take<Panel>(2 * column);
    float* scores = room.take<float>(keys * Q);    // [keys / 16][2][16 keys][16 queries]
    Panel* weights = room.take<Panel>(keys / KEYS * 2 * Math::PANEL);
    float* sums = room.take<float>(row.full * Q);  // [F / 16][2][16][16 queries]
    block.template turn<Math>([&](int64_t token, int64_t head) { return row.joint(token, head); }, queries, column);

    float* tile = scores;
    for (int64_t n = 0; n < block.num_runs; ++n) {
        const Keys& run = block.runs[n];
        for (int64_t key = 0; key < blocks_of(run.count) * KEYS; key += SIDE, tile += 2 * SQUARE) {
            if (key < run.count)
                Math::multiply(row.keys(run.start + key, block.h), row.stride, row.width, queries, queries + column, tile, false);
            if (block.sees_all(run, key)) continue;
            for (int64_t c = 0; c < 2; ++c)
                for (int64_t k = 0; k < SIDE; ++k)
                    block.hide(run, key + k, c, tile + c * SQUARE + k * SIDE, -INFINITY);
        }
    }
    float largest[2][SIDE], total[2][SIDE];
    for (int64_t c = 0; c < 2; ++c) {
        for (int64_t j = 0; j < SIDE; ++j) largest[c][j] = -INFINITY, total[c][j] = 0.0f;
        for (int64_t key = 0; key < keys; ++key) {
            const float* at = scores + key / SIDE * 2 * SQUARE + c * SQUARE + key % SIDE * SIDE;
#pragma omp simd
            for (int64_t j = 0; j < SIDE; ++j) largest[c][j] = std::max(largest[c][j], at[j]);
        }
        for (int64_t key = 0; key < keys; key += 2) {
            float* at = scores + key / SIDE * 2 * SQUARE + c * SQUARE + key % SIDE * SIDE;
#pragma omp simd
            for (int64_t j = 0; j < SIDE; ++j) {
                at[j] = exp_of(row.a.scaling * (at[j] - largest[c][j]));
                at[SIDE + j] = exp_of(row.a.scaling * (at[SIDE + j] - largest[c][j]));
                total[c][j] += at[j] + at[SIDE + j];
            }
            Math::put_pair(at, at + SIDE, key % KEYS / 2, weights + (key / KEYS * 2 + c) * Math::PANEL);
        }
    }
    for (int64_t d = 0; d < row.full / SIDE; ++d) {
        int64_t at = 0;
        for (int64_t n = 0; n < block.num_runs; ++n) {
            const Keys& run = block.runs[n];
            for (int64_t b = 0; b < blocks_of(run.count); ++b, ++at) {
                const T* values = turned_values + ((block.h * row.num_blocks + run.block + b) * row.full + d * SIDE) * KEYS;
                const Panel* panels = weights + at * 2 * Math::PANEL;
                Math::multiply(values, KEYS, KEYS, panels, panels + Math::PANEL, sums + d * 2 * SQUARE, at > 0);
            }
        }
    }
    block.write(sums, total, [&](int64_t token, int64_t head) {
        return static_cast<T*>(row.a.out) + (token * row.a.heads + head) * row.width;
    });
    for (int64_t i = 0; row.a.log_sum && i < block.count; ++i) {
        const int64_t c = i / SIDE, j = i % SIDE, at = block.token(i) * row.a.heads + block.head(i);
        row.a.log_sum[at] = row.a.scaling * largest[c][j] + std::log(total[c][j]);
    }
}

template <class T, class Math>
void forward(const PackedAttention& a) {
    static thread_local Scratch memory;
    const Row<T> row(a);
    T* turned = memory.of<T>(a.key_heads * row.num_blocks * row.full * KEYS);  // all threads write and read it
    struct Task {
        int64_t segment, h, first, last;
    };
    std::vector<Task> tasks;
    for (int64_t s = static_cast<int64_t>(row.segments.size()) - 1; s >= 0; --s) {
        const int64_t blocks = (row.segments[s].length * row.shared + Q - 1) / Q;
        for (int64_t h = 0; h < a.key_heads; ++h)
            for (int64_t first = 0; first < blocks; first += SLAB)
                tasks.push_back({s, h, first, std::min(blocks, first + SLAB)});
    }
#pragma omp parallel num_threads(row.threads())
    {
        static thread_local Room room;
        [[maybe_unused]] const Tiles tiles;
        row.turn(turned, [&](int64_t token, int64_t h) { return row.values(token, h); });
#pragma omp for schedule(dynamic, 1)
        for (size_t n = 0; n < tasks.size(); ++n)
            for (int64_t b = tasks[n].first; b < tasks[n].last; ++b)
                forward_block<T, Math>(Block<T>(row, row.segments[tasks[n].segment], tasks[n].h, b), turned, room);
    }
}

// Gradients of keys and values [keys / 16][F / 32][2][16 keys][16] of one run.
struct Sums {
    float *keys, *values;
};

template <class T, class Math>
void backward_block(const Block<T>& block, const T* turned_keys, const Sums* into, Room& room) {
    using Panel = typename Math::Panel;
    using Any = typename Math::Row;
    const Row<T>& row = block.row;
    const PackedAttention& a = row.a;
    const int64_t column = (row.width + KEYS - 1) / KEYS * Math::PANEL, pairs = row.full / KEYS;
    room.reserve((4 * column + 2 * row.full / SIDE * Math::PANEL + 2 * Math::PANEL) * sizeof(Panel) +
                 (row.full * Q + 4 * SQUARE) * sizeof(float) + 2 * SIDE * Q * sizeof(Any) + 8192);
    const auto query = [&](int64_t token, int64_t head) { return row.joint(token, head); };
    const auto grad = [&](int64_t token, int64_t head) {
        return static_cast<const T*>(a.grad_out) + (token * a.heads + head) * row.width;
    };
    Panel* queries = room.take<Panel>(2 * column);  // [2][E, 16 queries]
    Panel* grads = room.take<Panel>(2 * column);
    Panel* query_rows = room.take<Panel>(row.full / SIDE * Math::PANEL);  // [F / 16][32 queries, 16]
    Panel* grad_rows = room.take<Panel>(row.full / SIDE * Math::PANEL);
    block.template turn<Math>(query, queries, column);
    block.template turn<Math>(grad, grads, column);
    std::memset(query_rows, 0, row.full / SIDE * Math::PANEL * sizeof(Panel));
    std::memset(grad_rows, 0, row.full / SIDE * Math::PANEL * sizeof(Panel));
    float log_sum[2][SIDE] = {}, share[2][SIDE] = {};  // share: sum of out times its gradient
    for (int64_t i = 0; i < block.count; i += 2) {
        const bool both = i + 1 < block.count;
        const T* none = nullptr;
        Math::put_rows(query(block.token(i), block.head(i)), both ? query(block.token(i + 1), block.head(i + 1)) : none,
                       row.width, i / 2, query_rows);
        Math::put_rows(grad(block.token(i), block.head(i)), both ? grad(block.token(i + 1), block.head(i + 1)) : none,
                       row.width, i / 2, grad_rows);
    }
    for (int64_t i = 0; i < block.count; ++i) {
        const T* out = static_cast<const T*>(a.out) + (block.token(i) * a.heads + block.head(i)) * row.width;
        const T* given = grad(block.token(i), block.head(i));
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t e = 0; e < row.width; ++e) sum += widen(out[e]) * widen(given[e]);
        share[i / SIDE][i % SIDE] = sum;
        log_sum[i / SIDE][i % SIDE] = a.log_sum[block.token(i) * a.heads + block.head(i)];
    }
    float* query_sums = room.take<float>(row.full * Q);  // [F / 16][2][16][16 queries]
    std::memset(query_sums, 0, row.full * Q * sizeof(float));
    float* scores = room.take<float>(2 * SQUARE);
    float* grad_weights = room.take<float>(2 * SQUARE);
    Panel* turned = room.take<Panel>(2 * Math::PANEL);    // gradients of scores [2][32 keys, 16 queries]
    Any* weights = room.take<Any>(SIDE * Q);              // [16 keys][32 queries]
    Any* grad_scores = room.take<Any>(SIDE * Q);
    // One tile of 16 keys: weights and gradients of scores, and what they add to the gradients of keys and values.
    const auto grad_tile = [&](const Keys& run, int64_t n, int64_t key) {
        const int64_t skipped = run.offset - (n + 1 == block.num_runs ? block.segment.before : 0);
        Math::multiply(row.keys(run.start + key, block.h), row.stride, row.width, queries, queries + column, scores, false);
        Math::multiply(row.values(run.start + key, block.h), row.stride, row.width, grads, grads + column, grad_weights, false);
        const bool all = block.sees_all(run, key);
        for (int64_t c = 0; c < 2; ++c) {
            for (int64_t k = 0; k < SIDE; ++k) {
                float *score = scores + c * SQUARE + k * SIDE, *change = grad_weights + c * SQUARE + k * SIDE;
                Any *weight = weights + k * Q + c * SIDE, *grad_score = grad_scores + k * Q + c * SIDE;
                if (!all) {
                    block.hide(run, key + k, c, score, -INFINITY);
                    block.hide(run, key + k, c, change, 0.0f);
                }
#pragma omp simd
                for (int64_t j = 0; j < SIDE; ++j) {
                    const float p = exp_of(a.scaling * score[j] - log_sum[c][j]);
                    change[j] = a.scaling * p * (change[j] - share[c][j]);
                    round_to(p, weight[j]);
                    round_to(change[j], grad_score[j]);
                }
            }
            for (int64_t k = 0; k < SIDE; k += 2)
                Math::put_pair(grad_weights + c * SQUARE + k * SIDE, grad_weights + c * SQUARE + (k + 1) * SIDE,
                               (key % KEYS + k) / 2, turned + c * Math::PANEL);
        }
        const int64_t at = (skipped + key) / SIDE * pairs;
        for (int64_t d = 0; d < pairs; ++d) {
            const Panel *given = grad_rows + 2 * d * Math::PANEL, *asked = query_rows + 2 * d * Math::PANEL;
            Math::multiply(weights, Q, Q, given, given + Math::PANEL, into[n].values + (at + d) * 2 * SQUARE, true);
            Math::multiply(grad_scores, Q, Q, asked, asked + Math::PANEL, into[n].keys + (at + d) * 2 * SQUARE, true);
        }
    };
    for (int64_t n = 0; n < block.num_runs; ++n) {
        const Keys& run = block.runs[n];
        for (int64_t key = 0; key < blocks_of(run.count) * KEYS; key += SIDE) {
            if (key < run.count)
                grad_tile(run, n, key);
            else
                for (int64_t c = 0; c < 2; ++c) std::memset(turned + c * Math::PANEL + Math::PANEL / 2, 0, Math::PANEL / 2 * sizeof(Panel));
            if (key % KEYS == 0) continue;
            for (int64_t d = 0; d < row.full / SIDE; ++d) {
                const T* keys = turned_keys + ((block.h * row.num_blocks + run.block + key / KEYS) * row.full + d * SIDE) * KEYS;
                Math::multiply(keys, KEYS, KEYS, turned, turned + Math::PANEL, query_sums + d * 2 * SQUARE, true);
            }
        }
    }
    const float undivided[2][SIDE] = {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}};
    block.write(query_sums, undivided, [&](int64_t token, int64_t head) {
        return static_cast<T*>(a.grad_joint) + token * row.stride + head * row.width;
    });
}

// Writes the sums of `parts` runs that lie `apart` floats from each other.
template <class T>
void write_keys(const Row<T>& row, const Segment& segment, int64_t h, const Sums& sums, int64_t parts, int64_t apart) {
    for (int64_t t = 0; t < segment.length; ++t) {
        T* keys = static_cast<T*>(row.a.grad_joint) + (segment.start + t) * row.stride + (row.a.heads + h) * row.width;
        T* values = keys + row.a.key_heads * row.width;
        for (int64_t from = 0; from < row.width; from += SIDE) {
            const int64_t at = (t / SIDE * row.full + from) * SIDE + t % SIDE * SIDE, count = std::min(SIDE, row.width - from);
            Lanes key = {}, value = {};
            for (int64_t part = 0; part < parts; ++part) {
                key += lanes(sums.keys + part * apart + at);
                value += lanes(sums.values + part * apart + at);
            }
            round_lanes(key, keys + from, count);
            round_lanes(value, values + from, count);
        }
    }
}

template <class T, class Math>
void backward(const PackedAttention& a) {
    static thread_local Scratch memory, memory_of_sums;
    const Row<T> row(a);
    T* turned = memory.of<T>(a.key_heads * row.num_blocks * row.full * KEYS);  // all threads write and read it
    // A task: one prompt, one key head, and every `parts`-th of the answers. Each has sums of its own for the prompt.
    struct Task {
        int64_t g, h, part, parts;
        Sums sums;
    };
    std::vector<int64_t> first(a.num_prompts + 1, a.num_answers);
    for (int64_t n = a.num_answers - 1; n >= 0; --n) first[a.answers[3 * n + 2]] = n;
    for (int64_t g = a.num_prompts - 1; g >= 0; --g) first[g] = std::min(first[g], first[g + 1]);
    const int64_t wanted = (LEAST_TASKS + a.num_prompts * a.key_heads - 1) / (a.num_prompts * a.key_heads);
    std::vector<Task> tasks;
    std::vector<int64_t> offsets;
    int64_t room_needed = 0;
    for (int64_t g = 0; g < a.num_prompts; ++g) {
        const int64_t parts = std::max<int64_t>(1, std::min(wanted, first[g + 1] - first[g]));
        const int64_t size = blocks_of(row.segments[g].length) * KEYS * row.full;
        for (int64_t h = 0; h < a.key_heads; ++h)
            for (int64_t part = 0; part < parts; ++part) {
                tasks.push_back({g, h, part, parts, {}});
                offsets.push_back(room_needed);
                room_needed += 2 * size;
            }
    }
    float* prompt_sums = memory_of_sums.of<float>(room_needed);
    for (size_t n = 0; n < tasks.size(); ++n) {
        tasks[n].sums.keys = prompt_sums + offsets[n];
        tasks[n].sums.values = tasks[n].sums.keys + blocks_of(row.segments[tasks[n].g].length) * KEYS * row.full;
    }
#pragma omp parallel num_threads(row.threads())
    {
        static thread_local Room room;
        static thread_local Scratch own_memory;
        [[maybe_unused]] const Tiles tiles;
        row.turn(turned, [&](int64_t token, int64_t h) { return row.keys(token, h); });
        const auto run = [&](const Segment& segment, int64_t h, const Sums* sums) {
            for (int64_t b = 0; b < (segment.length * row.shared + Q - 1) / Q; ++b) {
                const Block<T> block(row, segment, h, b);
                backward_block<T, Math>(block, turned, block.num_runs == 1 ? sums + 1 : sums, room);
            }
        };
#pragma omp for schedule(dynamic, 1)
        for (size_t n = 0; n < tasks.size(); ++n) {
            const Task& task = tasks[n];
            const Segment& prompt = row.segments[task.g];
            std::memset(task.sums.keys, 0, 2 * blocks_of(prompt.length) * KEYS * row.full * sizeof(float));
            if (task.part == 0) {
                const Sums sums[2] = {{}, task.sums};
                run(prompt, task.h, sums);
            }
            for (int64_t answer = first[task.g] + task.part; answer < first[task.g + 1]; answer += task.parts) {
                const Segment& segment = row.segments[a.num_prompts + answer];
                const int64_t size = blocks_of(segment.length) * KEYS * row.full;
                float* own = own_memory.of<float>(2 * size);
                std::memset(own, 0, 2 * size * sizeof(float));
                const Sums sums[2] = {task.sums, {own, own + size}};
                run(segment, task.h, sums);
                write_keys(row, segment, task.h, sums[1], 1, 0);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t n = 0; n < tasks.size(); ++n) {
            const Segment& prompt = row.segments[tasks[n].g];
            if (tasks[n].part == 0)
                write_keys(row, prompt, tasks[n].h, tasks[n].sums, tasks[n].parts, 2 * blocks_of(prompt.length) * KEYS * row.full);
        }
    }
}

bool fits_tiles(const PackedAttention& a) { return HAS_TILES && a.in_tiles && a.width % TILE_K == 0; }

}  // namespace

extern "C" {

void packed_forward_float(const PackedAttention* a) { forward<float, Plain<float>>(*a); }

void packed_forward_bf16(const PackedAttention* a) {
    fits_tiles(*a) ? forward<bf16, InTiles>(*a) : forward<bf16, Plain<bf16>>(*a);
}

void packed_backward_float(const PackedAttention* a) { backward<float, Plain<float>>(*a); }

void packed_backward_bf16(const PackedAttention* a) {
    fits_tiles(*a) ? backward<bf16, InTiles>(*a) : backward<bf16, Plain<bf16>>(*a);
}

}  // extern "C"
