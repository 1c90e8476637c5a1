// kernels/cuda/ptx.cuh for the CPU: the same functions, written from the PTX manual's words.
#pragma once

#include "block.h"

namespace ptx {

using u32 = unsigned int;

enum class Format { float16, bfloat16 };

namespace detail {

inline float widen(Format format, unsigned bits) {
    if (format == Format::bfloat16) {
        return __int_as_float(bits << 16);
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = std::ldexp(static_cast<float>(exponent ? fraction + 1024 : fraction), max(exponent, 1) - 25);
    if (exponent == 31) {
        value = fraction ? NAN : INFINITY;
    }
    return bits >> 15 ? -value : value;
}

// To nearest even.
inline unsigned narrow(Format format, float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) {
        return 0x7fff;
    }
    if (format == Format::bfloat16) {
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    const float size = std::fabs(value);
    const int exponent = max(size > 0 ? std::ilogb(size) : -14, -14);
    const unsigned whole = size < 65520 ? static_cast<unsigned>(std::nearbyint(std::ldexp(size, 10 - exponent))) : 1024;
    return (size < 65520 ? exponent + 14 : 30) * 1024 + whole + (bits >> 31 << 15);
}

// The element of a register that holds two.
inline unsigned half_of(u32 pair, int index) { return pair >> 16 * index & 0xffff; }

struct Matrices {
    u32* d;
    u32 row;
};

template <int COUNT, bool TRANSPOSED>
void load_matrices(void* const (&operands)[warp_size]) {
    for (int matrix = 0; matrix < COUNT; ++matrix) {
        unsigned addresses[8];
        std::uint16_t elements[8][8];
        for (int row = 0; row < 8; ++row) {
            addresses[row] = static_cast<Matrices*>(operands[8 * matrix + row])->row;
            std::memcpy(elements[row], host::shared_at(addresses[row]), 16);
        }
        host::count_conflicts(host::block.conflicts[0], addresses);
        for (int lane = 0; lane < warp_size; ++lane) {
            const int g = lane / 4, t = lane % 4;
            const unsigned low = TRANSPOSED ? elements[2 * t][g] : elements[g][2 * t];
            const unsigned high = TRANSPOSED ? elements[2 * t + 1][g] : elements[g][2 * t + 1];
            static_cast<Matrices*>(operands[lane])->d[matrix] = low | high << 16;
        }
    }
}

template <int COUNT, bool TRANSPOSED>
void ldmatrix(u32* d, u32 row) {
    Matrices operands{d, row};
    host::together(load_matrices<COUNT, TRANSPOSED>, &operands);
}

struct Product {
    float* c;
    const u32* a;
    u32 b[2];
};

template <Format format>
void multiply(void* const (&operands)[warp_size]) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < warp_size; ++lane) {
        const Product& p = *static_cast<Product*>(operands[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int e = 0; e < 2; ++e) {
            for (int i = 0; i < 4; ++i) {
                a[g + i % 2 * 8][2 * t + e + i / 2 * 8] = widen(format, half_of(p.a[i], e));
            }
            for (int i = 0; i < 2; ++i) {
                b[2 * t + e + 8 * i][g] = widen(format, half_of(p.b[i], e));
            }
        }
    }
    for (int lane = 0; lane < warp_size; ++lane) {
        const Product& p = *static_cast<Product*>(operands[lane]);
        for (int e = 0; e < 4; ++e) {
            double sum = p.c[e];
            for (int k = 0; k < 16; ++k) {
                sum += static_cast<double>(a[lane / 4 + e / 2 * 8][k]) * b[k][lane % 4 * 2 + e % 2];
            }
            p.c[e] = static_cast<float>(sum);
        }
    }
}

struct Shuffle {
    float value, result;
    int bits;
};

inline void exchange(void* const (&operands)[warp_size]) {
    for (int lane = 0; lane < warp_size; ++lane) {
        Shuffle& to = *static_cast<Shuffle*>(operands[lane]);
        to.result = static_cast<Shuffle*>(operands[lane ^ to.bits])->value;
    }
}

}  // namespace detail

inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(static_cast<const unsigned char*>(pointer) - shared);
}

inline void cp_async_cg(u32 to, const void* from, u32 bytes) {
    if (reinterpret_cast<std::uintptr_t>(from) % 16) {
        host::fail("a global address that is no multiple of 16", reinterpret_cast<long>(from));
    }
    host::Thread& self = *host::block.current;
    self.targets.push_back(to);
    const host::Copy copy{to, from, bytes, self.groups};
    if (host::block.late) {
        self.copies.push_back(copy);
    } else {
        host::land(copy);
    }
}

inline void cp_async_commit_group() { ++host::block.current->groups; }

template <int N>
void cp_async_wait_group() {
    host::Thread& self = *host::block.current;
    std::vector<host::Copy> left;
    for (const host::Copy& copy : self.copies) {
        if (copy.group < self.groups - N) {
            host::land(copy);
        } else {
            left.push_back(copy);
        }
    }
    self.copies = left;
}

inline void ldmatrix_x4(u32 (&d)[4], u32 row) { detail::ldmatrix<4, false>(d, row); }
inline void ldmatrix_x4_trans(u32 (&d)[4], u32 row) { detail::ldmatrix<4, true>(d, row); }

template <Format format>
void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    detail::Product operands{c, a, {b0, b1}};
    host::together(detail::multiply<format>, &operands);
}

inline float ex2(float x) {
    const auto flushed = [](float y) { return std::fpclassify(y) == FP_SUBNORMAL ? std::copysign(0.0f, y) : y; };
    return flushed(std::exp2(flushed(x)));
}
inline float lg2(float x) { return std::log2(x); }

template <Format format>
u32 pack(float low, float high) {
    return detail::narrow(format, low) | detail::narrow(format, high) << 16;
}

inline float shfl_bfly(float x, int bits) {
    detail::Shuffle operands{x, 0.0f, bits};
    host::together(detail::exchange, &operands);
    return operands.result;
}

}  // namespace ptx
