// kernels/cuda/ptx.cuh for the CPU: the same functions, written from the PTX manual's words.
#pragma once

#include "block.h"

namespace ptx {

using u32 = unsigned int;

enum class Format { float16, bfloat16, float8_e4m3fn, float8_e5m2 };

template <Format format>
constexpr int size_of = format == Format::float16 || format == Format::bfloat16 ? 2 : 1;

namespace detail {

constexpr bool is_float8(Format format) {
    return format == Format::float8_e4m3fn || format == Format::float8_e5m2;
}

// Bits of the fraction, and the exponent of the smallest normal number.
constexpr int fraction_bits(Format format) {
    constexpr int bits[] = {10, 7, 3, 2};
    return bits[static_cast<int>(format)];
}
constexpr int least_exponent(Format format) {
    constexpr int exponents[] = {-14, -126, -6, -14};
    return exponents[static_cast<int>(format)];
}

inline float widen(Format format, unsigned bits) {
    if (format == Format::bfloat16) {
        return __int_as_float(bits << 16);
    }
    const int width = is_float8(format) ? 8 : 16, places = fraction_bits(format);
    const int exponent = (bits & ((1 << (width - 1)) - 1)) >> places;
    const int fraction = bits & ((1 << places) - 1), one = 1 << places;
    float value = std::ldexp(
        static_cast<float>(exponent ? fraction + one : fraction),
        max(exponent, 1) - 1 + least_exponent(format) - places
    );
    if (format == Format::float8_e4m3fn) {
        value = (bits & 0x7f) == 0x7f ? NAN : value;  // its only one; no infinity
    } else if (exponent == (1 << (width - 1 - places)) - 1) {
        value = fraction ? NAN : INFINITY;
    }
    return bits >> (width - 1) ? -value : value;
}

// To nearest even, once.  What is beyond the largest number becomes infinity in 16 bits, in 8 bits
// that number (.satfinite).
inline unsigned narrow(Format format, double value) {
    constexpr unsigned largest[] = {0x7c00, 0x7f80, 0x7e, 0x7b};
    const int width = is_float8(format) ? 8 : 16, places = fraction_bits(format);
    if (std::isnan(value)) {
        return (1u << (width - 1)) - 1;
    }
    const unsigned sign = std::signbit(value) ? 1u << (width - 1) : 0;
    const unsigned limit = largest[static_cast<int>(format)];
    const double size = std::fabs(value);
    if (std::isinf(size)) {
        return sign | limit;
    }
    const int least = least_exponent(format);
    const int exponent = max(size > 0 ? std::ilogb(size) : least, least);
    const double whole = std::nearbyint(std::ldexp(size, places - exponent));
    const double rounded = (exponent - least) * (1 << places) + whole;  // a carry is in its place
    return sign | (rounded < limit ? static_cast<unsigned>(rounded) : limit);
}

// The element of a register that holds two.
inline unsigned half_of(u32 pair, int index) { return pair >> 16 * index & 0xffff; }

// ldmatrix and stmatrix: registers, by matrix, and the address of a row.
template <typename Register>
struct Matrices {
    Register* d;
    u32 row;
};

// Calls act(matrix, element, register, shift) for every element, which is in the register of a
// lane, `shift` bits from its lowest.
template <int COUNT, bool TRANSPOSED, typename Register, typename Act>
void each_element(void* const (&operands)[warp_size], Act act) {
    for (int matrix = 0; matrix < COUNT; ++matrix) {
        unsigned addresses[8];
        unsigned char* rows[8];
        for (int row = 0; row < 8; ++row) {
            addresses[row] = static_cast<Matrices<Register>*>(operands[8 * matrix + row])->row;
            rows[row] = host::shared_at(addresses[row]);
        }
        host::count_conflicts(host::block.conflicts[0], addresses);
        for (int lane = 0; lane < warp_size; ++lane) {
            Register* d = static_cast<Matrices<Register>*>(operands[lane])->d;
            for (int e = 0; e < 2; ++e) {
                const int i = lane / 4, j = lane % 4 * 2 + e;
                act(TRANSPOSED ? rows[j] + 2 * i : rows[i] + 2 * j, d[matrix], 16 * e);
            }
        }
    }
}

template <int COUNT, bool TRANSPOSED>
void load_matrices(void* const (&operands)[warp_size]) {
    const auto load = [](const unsigned char* element, u32& d, int shift) {
        const u32 bits = element[0] | element[1] << 8;
        d = shift ? d | bits << 16 : bits;
    };
    each_element<COUNT, TRANSPOSED, u32>(operands, load);
}

template <int COUNT, bool TRANSPOSED>
void store_matrices(void* const (&operands)[warp_size]) {
    const auto store = [](unsigned char* element, u32 d, int shift) {
        element[0] = static_cast<unsigned char>(d >> shift);
        element[1] = static_cast<unsigned char>(d >> (shift + 8));
    };
    each_element<COUNT, TRANSPOSED, const u32>(operands, store);
}

template <int COUNT, bool TRANSPOSED>
void ldmatrix(u32* d, u32 row) {
    Matrices<u32> operands{d, row};
    host::together(load_matrices<COUNT, TRANSPOSED>, &operands);
}

template <int COUNT, bool TRANSPOSED>
void stmatrix(u32 row, const u32* d) {
    Matrices<const u32> operands{d, row};
    host::together(store_matrices<COUNT, TRANSPOSED>, &operands);
}

struct Fragments {
    void* c;  // float[4], u32[2] or double[2]
    const void* a;
    const void* b;
};

// Elements of `SIZE` bytes that a lane's A and B fragments hold, in the manual's numbering a0,
// a1...: row and column of each.
//   m16n8k4 .tf32, m16n8k8 .f16, .bf16, m16n8k16 .e4m3, .e5m2:
//     row g for the first half of the elements, g + 8 for the rest
//   m16n8k8 .tf32, m16n8k16 .f16, .bf16, m16n8k32 .e4m3, .e5m2:
//     the same twice, for columns of the first and second half of K
template <int SIZE, int DEPTH>
void gather(void* const (&operands)[warp_size], unsigned char* a, unsigned char* b) {
    constexpr int bytes = SIZE * DEPTH, per_register = 4 / SIZE, halves = bytes / 16;
    for (int lane = 0; lane < warp_size; ++lane) {
        const auto& own = *static_cast<Fragments*>(operands[lane]);
        const int group = lane >> 2, thread = lane % 4;
        for (int i = 0; i < halves * 2 * per_register; ++i) {
            const int row = i / per_register % 2 ? group + 8 : group;
            const int column =
                thread * per_register + i % per_register + i / (2 * per_register) * (DEPTH / 2);
            const auto* from = static_cast<const unsigned char*>(own.a) + i * SIZE;
            std::memcpy(a + row * bytes + column * SIZE, from, SIZE);
        }
        for (int i = 0; own.b && i < halves * per_register; ++i) {
            const int row =
                thread * per_register + i % per_register + i / per_register * (DEPTH / 2);
            const auto* from = static_cast<const unsigned char*>(own.b) + i * SIZE;
            std::memcpy(b + group * bytes + row * SIZE, from, SIZE);
        }
    }
}

// Gathers C, lets multiply(c) change it in place, and puts D back: c0, c1 at row g, columns 2t,
// 2t + 1; c2, c3 at row g + 8.
template <typename Element, typename Multiply>
void accumulate(void* const (&operands)[warp_size], Multiply multiply) {
    Element c[16][8];
    for (int pass = 0; pass < 2; ++pass) {
        for (int lane = 0; lane < warp_size; ++lane) {
            auto* own = static_cast<Element*>(static_cast<Fragments*>(operands[lane])->c);
            for (int i = 0; i < 4; ++i) {
                Element& place = c[i < 2 ? lane >> 2 : (lane >> 2) + 8][lane % 4 * 2 + (i & 1)];
                (pass ? own[i] : place) = pass ? place : own[i];
            }
        }
        if (pass == 0) {
            multiply(c);
        }
    }
}

inline void widen_all(Format format, int size, const unsigned char* bytes, int count, float* to) {
    for (int i = 0; i < count; ++i) {
        const unsigned low = bytes[i * size];
        to[i] = widen(format, size == 2 ? low | bytes[i * size + 1] << 8 : low);
    }
}

// A sum of fp32, or of fp16 as bits.
inline double as_double(float c) { return c; }
inline double as_double(std::uint16_t c) { return widen(Format::float16, c); }
inline void put(double sum, float& c) { c = static_cast<float>(sum); }
inline void put(double sum, std::uint16_t& c) {
    c = static_cast<std::uint16_t>(narrow(Format::float16, sum));
}

// Models an ideal instruction: exact products, added to C in fp64 in the order of K, and rounded to
// the accumulator's format once.  A tensor core keeps fewer bits of the sum.
template <Format format, typename Element>
void multiply(void* const (&operands)[warp_size]) {
    constexpr int depth = 32 / size_of<format>;
    unsigned char a_bytes[16 * 32], b_bytes[8 * 32];
    float a[16][depth], b[8][depth];
    gather<size_of<format>, depth>(operands, a_bytes, b_bytes);
    widen_all(format, size_of<format>, a_bytes, 16 * depth, &a[0][0]);
    widen_all(format, size_of<format>, b_bytes, 8 * depth, &b[0][0]);
    accumulate<Element>(operands, [&](Element(&c)[16][8]) {
        for (int row = 0; row < 16; ++row) {
            for (int column = 0; column < 8; ++column) {
                double sum = as_double(c[row][column]);
                for (int k = 0; k < depth; ++k) {
                    sum += static_cast<double>(a[row][k]) * b[column][k];
                }
                put(sum, c[row][column]);
            }
        }
    });
}

template <Format format, typename Element>
void mma(void* c, const u32* a, u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    Fragments operands{c, a, b};
    host::together(multiply<format, Element>, &operands);
}

struct Shuffle {
    u32 value, result;
    int from;
};

inline void exchange(void* const (&operands)[warp_size]) {
    for (int lane = 0; lane < warp_size; ++lane) {
        Shuffle& to = *static_cast<Shuffle*>(operands[lane]);
        to.result = static_cast<Shuffle*>(operands[to.from % warp_size])->value;
    }
}

inline u32 shuffle(u32 x, int from) {
    Shuffle operands{x, 0, from};
    host::together(exchange, &operands);
    return operands.result;
}

inline int lane() { return static_cast<int>(threadIdx.x) % warp_size; }

inline void copy(u32 to, const void* from, unsigned size, u32 bytes) {
    if (reinterpret_cast<std::uintptr_t>(from) % size) {
        host::fail("a global address that is no multiple of the copy", static_cast<long>(size));
    }
    if (bytes > size) {
        host::fail("more bytes to copy than the copy has", bytes);
    }
    host::Thread& self = *host::block.current;
    host::Copy copy{to, from, size, bytes, self.groups, {}};
    self.targets.push_back({to, size});
    if (host::block.late) {
        std::memcpy(copy.there, host::shared_at(to, size), size);
        self.copies.push_back(copy);
    } else {
        host::land(copy);
    }
}

}  // namespace detail

inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(static_cast<const unsigned char*>(pointer) - shared);
}

inline void cp_async_cg(u32 to, const void* from, u32 bytes) { detail::copy(to, from, 16, bytes); }

template <int size = 16>
void cp_async_ca(u32 to, const void* from, u32 bytes) {
    static_assert(size == 4 || size == 8 || size == 16);
    detail::copy(to, from, size, bytes);
}

inline void cp_async_commit_group() { ++host::block.current->groups; }

template <int N>
void cp_async_wait_group() {
    host::Thread& self = *host::block.current;
    std::vector<host::Copy> left;
    for (const host::Copy& copy : self.copies) {
        if (copy.group < self.groups - N) {
            host::check_way(copy);
            host::land(copy);
        } else {
            left.push_back(copy);
        }
    }
    self.copies = left;
}

inline void ldmatrix_x1(u32& d, u32 row) { detail::ldmatrix<1, false>(&d, row); }
inline void ldmatrix_x2(u32 (&d)[2], u32 row) { detail::ldmatrix<2, false>(d, row); }
inline void ldmatrix_x4(u32 (&d)[4], u32 row) { detail::ldmatrix<4, false>(d, row); }
inline void ldmatrix_x1_trans(u32& d, u32 row) { detail::ldmatrix<1, true>(&d, row); }
inline void ldmatrix_x2_trans(u32 (&d)[2], u32 row) { detail::ldmatrix<2, true>(d, row); }
inline void ldmatrix_x4_trans(u32 (&d)[4], u32 row) { detail::ldmatrix<4, true>(d, row); }

inline void stmatrix_x1(u32 row, u32 d) { detail::stmatrix<1, false>(row, &d); }
inline void stmatrix_x2(u32 row, const u32 (&d)[2]) { detail::stmatrix<2, false>(row, d); }
inline void stmatrix_x4(u32 row, const u32 (&d)[4]) { detail::stmatrix<4, false>(row, d); }
inline void stmatrix_x1_trans(u32 row, u32 d) { detail::stmatrix<1, true>(row, &d); }
inline void stmatrix_x2_trans(u32 row, const u32 (&d)[2]) { detail::stmatrix<2, true>(row, d); }
inline void stmatrix_x4_trans(u32 row, const u32 (&d)[4]) { detail::stmatrix<4, true>(row, d); }

template <Format format>
void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(size_of<format> == 2);
    detail::mma<format, float>(c, a, b0, b1);
}

template <Format format>
void mma_m16n8k32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(size_of<format> == 1);
    detail::mma<format, float>(c, a, b0, b1);
}

inline void mma_m16n8k16_f16(u32 (&c)[2], const u32 (&a)[4], u32 b0, u32 b1) {
    detail::mma<Format::float16, std::uint16_t>(c, a, b0, b1);
}

inline float ex2(float x) {
    const auto flushed = [](float y) {
        return std::fpclassify(y) == FP_SUBNORMAL ? std::copysign(0.0f, y) : y;
    };
    return flushed(std::exp2(flushed(x)));
}

inline u32 ex2_approx_f16x2(u32 x) {
    const auto half = [x](int index) {
        const float y = std::exp2(detail::widen(Format::float16, detail::half_of(x, index)));
        return detail::narrow(Format::float16, y);
    };
    return half(0) | half(1) << 16;
}

inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return 1 / x; }

template <Format format>
u32 pack(float low, float high) {
    static_assert(size_of<format> == 2);
    return detail::narrow(format, low) | detail::narrow(format, high) << 16;
}

template <Format format>
u32 pack(float x0, float x1, float x2, float x3) {
    static_assert(size_of<format> == 1);
    const u32 low = detail::narrow(format, x0) | detail::narrow(format, x1) << 8;
    return low | (detail::narrow(format, x2) | detail::narrow(format, x3) << 8) << 16;
}

template <Format format>
void unpack(u32 packed, float& low, float& high) {
    low = detail::widen(format, detail::half_of(packed, 0));
    high = detail::widen(format, detail::half_of(packed, 1));
}

inline u32 prmt(u32 a, u32 b, u32 selector) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(b) << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 choice = selector >> 4 * i, byte = bytes >> 8 * (choice & 7) & 0xff;
        const u32 sign = byte >> 7 ? 0xff : 0;
        d |= (choice & 8 ? sign : byte) << 8 * i;
    }
    return d;
}

inline u32 shfl_bfly(u32 x, int bits) { return detail::shuffle(x, detail::lane() ^ bits); }
inline float shfl_bfly(float x, int bits) {
    u32 word;
    std::memcpy(&word, &x, 4);
    return __int_as_float(shfl_bfly(word, bits));
}
inline u32 shfl_idx(u32 x, int lane) { return detail::shuffle(x, lane); }

}  // namespace ptx
