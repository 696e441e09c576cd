// Numbers of two widths, and the loops over rows of them that several kernels share. Sums are float32; what leaves a
// kernel is rounded once.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline void round_to(float x, float& out) { out = x; }

// To the nearest, ties to even; a number that is none stays none.
inline void round_to(float x, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

template <class T>
inline float rounded(float x) {
    T narrow;
    round_to(x, narrow);
    return widen(narrow);
}

// exp(x) for x <= 0 within 2e-7 of itself, without a branch, so that loops over it become vector code; 0 below -87.
inline float exp_of(float x) {
    const float safe = std::max(x, -87.0f);
    const float whole = std::floor(safe * 1.44269504f + 0.5f);
    const float rest = (safe - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : sum * scale;
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t width, float epsilon) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += widen(x[i]) * widen(x[i]);
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(width) + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) round_to(widen(x[i]) * scale * widen(weight[i]), out[i]);
}

// Memory that grows and is kept from call to call; what was in it is not. It begins with a cache line: to load a wide
// register across two takes twice the time, and what was just stored has to reach the cache first.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    template <class T>
    T* of(int64_t count) {
        const size_t size = (count * sizeof(T) + 63) / 64 * 64;
        if (size > size_) {
            std::free(memory_);
            memory_ = std::aligned_alloc(64, size);
            size_ = size;
        }
        return static_cast<T*>(memory_);
    }

private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

}  // namespace
