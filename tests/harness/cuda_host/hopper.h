// Hopper's units on the CPU, for kernels of CuTe: mbarriers, named barriers, tensor copies and wgmma, on block.h's threads.
//
// Written from the words of the PTX manual: "mbarrier", "Tensor Swizzling Modes", "Asynchronous Warpgroup Level Matrix
// Instructions" (canonical layouts, register fragments).  Copies and products happen at once, or (`block.late`) when
// they are waited for.  A wait is a sleep until the other warps have done what it needs.
#pragma once

#include <initializer_list>

#include "ptx.cuh"

namespace hopper {

using host::block;

constexpr int patience = 1000;  // turns of all other warps until a wait is a deadlock

inline int dropped = 0;    // where a wait is passed by: a line of the producer's header, or of a source, negated
inline int unmet = -1;     // the named barrier that is passed by
inline bool hasty = false;  // waits for products leave one group more in flight
// Bits of warps that fall behind after every wait at an mbarrier, and `products`.
inline unsigned slow = 0;
// Products are carried out when they are waited for, behind other warps.
constexpr unsigned products = 1u << 31;
constexpr unsigned nap = 7;  // by so many turns

inline bool passed_by(const char* file, int line) {
    return dropped == (std::strstr(file, "hopper_producer") ? line : -line);
}

// As an mbarrier's 8 bytes.
struct Barrier {
    std::int32_t bytes;  // that are still to come
    std::uint8_t count, pending;
    std::uint8_t phase;
    std::uint8_t alive;
    void settle() {
        if (pending == 0 && bytes == 0) {
            phase ^= 1;
            pending = count;
        }
    }
};
static_assert(sizeof(Barrier) == 8);

inline Barrier& barrier(std::uint64_t& word) {
    auto& made = reinterpret_cast<Barrier&>(word);
    host::shared_at(ptx::shared_address(&word), 8);
    if (made.alive != 1) {
        host::fail("a barrier that is not initialised", ptx::shared_address(&word));
    }
    return made;
}

inline void init(std::uint64_t& word, int count) {
    const auto size = static_cast<std::uint8_t>(count);
    reinterpret_cast<Barrier&>(word) = {0, size, size, 0, 1};
}

inline void arrive(std::uint64_t& word, std::uint32_t bytes = 0) {
    Barrier& made = barrier(word);
    if (made.pending == 0) {
        host::fail("one arrival too many", ptx::shared_address(&word));
        return;
    }
    made.bytes += static_cast<std::int32_t>(bytes);
    --made.pending;
    made.settle();
}

// A tensor map as the tests encode it.
struct Map {
    std::uint64_t address, dims[4], strides[3];
    std::uint32_t box[4];
    // Bytes of an element, and of a row of the swizzle: one chunk's where there is none.
    std::uint32_t element, row;
};

struct TensorCopy {
    Map map;
    std::uint64_t* here;
    unsigned to;
    int at[4];
};
inline std::vector<TensorCopy> flying;
inline int copies = 0;  // of a run

// 128-byte swizzle: bits 4 to 6 of the address are those of the chunk xor bits 7 to 9, those of the row; 64-byte
// swizzle: bits 4 and 5 are those of the chunk xor bits 7 and 8, since two rows have 128 bytes.
inline unsigned swizzled(unsigned address, unsigned row = 128) { return address ^ (address >> 7 & (row / 16 - 1)) << 4; }

inline void land(const TensorCopy& copy) {
    const Map& map = copy.map;
    const unsigned size = map.element;
    unsigned to = copy.to;
    for (unsigned row = 0; row < map.box[1]; ++row) {
        for (unsigned column = 0; column < map.box[0]; ++column, to += size) {
            const std::int64_t place[4] = {copy.at[0] + std::int64_t(column), copy.at[1] + std::int64_t(row), copy.at[2], copy.at[3]};
            bool inside = true;
            std::uint64_t from = map.address + size * place[0];
            for (int i = 0; i < 4; ++i) {
                inside = inside && place[i] >= 0 && std::uint64_t(place[i]) < map.dims[i];
                from += i ? place[i] * map.strides[i - 1] : 0;
            }
            unsigned char* element = host::shared_at(swizzled(to, map.row), size);
            std::memset(element, 0, size);
            if (inside) {
                std::memcpy(element, reinterpret_cast<const void*>(from), size);
            }
        }
    }
    Barrier& made = barrier(*copy.here);
    made.bytes -= static_cast<std::int32_t>(size * map.box[0] * map.box[1]);
    made.settle();
}

inline void tensor_copy(const void* map, std::uint64_t* here, void* to, std::initializer_list<int> at) {
    ++copies;
    TensorCopy copy{{}, here, ptx::shared_address(to), {}};
    std::memcpy(&copy.map, map, sizeof copy.map);
    std::copy(at.begin(), at.end(), copy.at);
    const bool wide = copy.map.row == 16 || copy.map.element * copy.map.box[0] == copy.map.row;
    if (copy.to % 128 || reinterpret_cast<std::uintptr_t>(map) % 64 || !wide) {
        host::fail("a tensor copy that is not aligned, or no swizzled row wide", copy.to);
    }
    if (block.late) {
        flying.push_back(copy);
    } else {
        land(copy);
    }
}

struct Wait {
    std::uint64_t* word;
    int parity, tries;
    bool over;
};

// The lanes of a warp look together.  What flies lands last of all, the latest first, and no more
// than the phase needs.
inline void look(void* const (&operands)[warp_size]) {
    Wait& first = *static_cast<Wait*>(operands[0]);
    Barrier& made = barrier(*first.word);
    if (made.phase == first.parity && first.tries > 2) {
        for (std::size_t i = flying.size(); i-- > 0 && made.phase == first.parity;) {
            if (flying[i].here == first.word) {
                const TensorCopy copy = flying[i];
                flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(i));
                land(copy);
            }
        }
    }
    for (void* each : operands) {
        Wait& wait = *static_cast<Wait*>(each);
        if (wait.word != first.word || wait.parity != first.parity) {
            host::fail("lanes wait for different phases", wait.parity);
        }
        wait.over = made.phase != first.parity;
    }
}

inline void wait(std::uint64_t& word, int parity) {
    for (Wait wait{&word, parity, 0, false};;) {
        host::together(look, &wait);
        if (wait.over) {
            if (slow >> threadIdx.x / warp_size & 1) {
                host::sleep(nap);
            }
            return;
        }
        if (++wait.tries > patience) {
            host::fail("a deadlock at the barrier", ptx::shared_address(&word));
        }
        host::sleep(1);
    }
}

// bar.sync of some warps.
struct Meeting {
    unsigned arrived, over;
};
inline Meeting meetings[16];

struct Arrival {
    unsigned id, threads, before;
};

inline void join(void* const (&operands)[warp_size]) {
    Arrival& first = *static_cast<Arrival*>(operands[0]);
    Meeting& meeting = meetings[first.id];
    const unsigned before = meeting.over;
    meeting.arrived += warp_size;
    if (meeting.arrived == first.threads) {
        meeting = {0, before + 1};
    }
    for (void* each : operands) {
        static_cast<Arrival*>(each)->before = before;
    }
}

inline void meet(unsigned threads, unsigned id) {
    if (static_cast<int>(id) == unmet) {
        return;
    }
    Arrival arrival{id, threads, 0};
    host::together(join, &arrival);
    for (int tries = 0; meetings[id].over == arrival.before; ++tries) {
        if (tries > patience) {
            host::fail("a deadlock at the named barrier", id);
        }
        host::sleep(1);
    }
}

// One lane's part of wgmma m64nNk16, or m64nNk32 of 8 bits.  a: its registers of A, or null where A has a descriptor.
struct Product {
    const std::uint32_t* a[4];
    std::uint64_t left, right;
    std::vector<float*> d;
    bool major_n, adds;
    int group;
    ptx::Format format;
};
inline std::vector<Product> pending[32][warp_size];  // of warps
inline int groups[32];                               // committed

// The address of (m or n, k) of an operand that lies K-major, or N-major in 16 bits, with swizzled rows of 128 bytes or,
// K-major, of 64.
inline unsigned element_at(std::uint64_t descriptor, bool major_n, unsigned mn, unsigned k, unsigned size = 2) {
    const auto field = [descriptor](int shift) { return static_cast<unsigned>(descriptor >> shift & 0x3fff) << 4; };
    const unsigned start = field(0), leading = field(16), stride = field(32), type = descriptor >> 62;
    const unsigned row = type == 1 ? 128 : 64;
    if ((type != 1 && (type != 2 || major_n)) || (descriptor >> 49 & 7) != 0 || (major_n && size != 2)) {
        host::fail("a descriptor of another layout than rows of 128 or 64 bytes", static_cast<long>(descriptor >> 48));
    }
    return swizzled(
        major_n ? start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                : start + mn / 8 * stride + mn % 8 * row + k * size,
        row
    );
}

inline unsigned element(ptx::Format format, unsigned address) {
    const unsigned char* bytes = host::shared_at(address, static_cast<unsigned>(ptx::detail::is_float8(format) ? 1 : 2));
    return ptx::detail::is_float8(format) ? bytes[0] : bytes[0] | bytes[1] << 8;
}

// An operand of 8 bits: its significand, an integer, and the exponent of the significand's leading place, which
// subnormals share with the smallest normal numbers.
struct Small {
    int significand, place;
    bool finite;
};
inline Small small(ptx::Format format, unsigned bits) {
    const int fraction = ptx::detail::fraction_bits(format), least = ptx::detail::least_exponent(format);
    const int field = static_cast<int>(bits & 0x7f) >> fraction, low = static_cast<int>(bits) & ((1 << fraction) - 1);
    const int size = field ? low | 1 << fraction : low;
    return {bits & 0x80 ? -size : size, max(field, 1) - 1 + least, std::isfinite(ptx::detail::widen(format, bits))};
}

// x * 2^by of an integer, toward zero.
inline std::int64_t shifted(std::int64_t x, int by) {
    const std::int64_t size = x < 0 ? -x : x;
    const std::int64_t moved = by >= 0 ? size << min(by, 40) : size >> min(-by, 62);
    return x < 0 ? -moved : moved;
}

// 32 products of 8-bit operands and the accumulator, as Hopper adds them (docs/arithmetic.md): aligned to the largest
// exponent, cut off after 13 fraction bits, added, and the sum cut off after 13 fraction bits.
inline float sum_of_small(ptx::Format format, const Small* a, const Small* b, float c) {
    constexpr int kept = 13, of_zero = -133;
    const int fraction = 2 * ptx::detail::fraction_bits(format);
    if (!std::isfinite(c) || !std::all_of(a, a + 32, [](const Small& x) { return x.finite; }) ||
        !std::all_of(b, b + 32, [](const Small& x) { return x.finite; })) {
        return NAN;  // of infinities, too: no kernel here has any
    }
    int exponent = 0;
    const auto carry = static_cast<std::int64_t>(std::ldexp(std::frexp(c, &exponent), 24));
    exponent -= 1;
    int most = c == 0 ? of_zero : exponent;
    for (int k = 0; k < 32; ++k) {
        const bool zero = a[k].significand == 0 || b[k].significand == 0;
        most = max(most, zero ? of_zero : a[k].place + b[k].place);
    }
    std::int64_t total = c == 0 ? 0 : shifted(carry, kept - 23 + exponent - most);
    for (int k = 0; k < 32; ++k) {
        const int place = a[k].place + b[k].place;
        total += shifted(a[k].significand * b[k].significand, kept - fraction + place - most);
    }
    int length = 0;
    std::frexp(static_cast<double>(total), &length);
    const int cut = max(length - 1 - kept, 0);
    return static_cast<float>(std::ldexp(static_cast<double>(shifted(shifted(total, -cut), cut)), most - kept));
}

// The 16 rows of a warp.  16 bits: exact products added in fp64 and rounded once, as ptx.cuh's.  8 bits: as above.
inline void multiply(unsigned warp, const std::vector<Product*>& lanes) {
    const ptx::Format format = lanes[0]->format;
    const bool eight = ptx::detail::is_float8(format);
    const unsigned size = eight ? 1 : 2, depth = 32 / size, each = 4 / size;  // elements of a register
    const unsigned columns = static_cast<unsigned>(lanes[0]->d.size()) * 2;
    std::vector<unsigned> a(16 * depth), b(columns * depth);  // bits
    for (unsigned k = 0; k < depth; ++k) {
        for (unsigned n = 0; n < columns; ++n) {
            b[n * depth + k] = element(format, element_at(lanes[0]->right, lanes[0]->major_n, n, k, size));
        }
        for (unsigned m = 0; lanes[0]->a[0] == nullptr && m < 16; ++m) {
            a[m * depth + k] = element(format, element_at(lanes[0]->left, false, warp % 4 * 16 + m, k, size));
        }
    }
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        if (lanes[lane]->left != lanes[0]->left || lanes[lane]->right != lanes[0]->right) {
            host::fail("lanes with different descriptors", lane);
        }
        for (unsigned i = 0; lanes[lane]->a[0] != nullptr && i < 4 * each; ++i) {
            const unsigned reg = i / each, row = lane / 4 + reg % 2 * 8;
            const unsigned column = lane % 4 * each + i % each + reg / 2 * (depth / 2);
            a[row * depth + column] = *lanes[lane]->a[reg] >> (i % each * 8 * size) & (eight ? 0xff : 0xffff);
        }
    }
    std::vector<float> wide_a, wide_b;
    std::vector<Small> small_a, small_b;
    for (const unsigned bits : a) {
        eight ? small_a.push_back(small(format, bits)) : wide_a.push_back(ptx::detail::widen(format, bits));
    }
    for (const unsigned bits : b) {
        eight ? small_b.push_back(small(format, bits)) : wide_b.push_back(ptx::detail::widen(format, bits));
    }
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        Product& own = *lanes[lane];
        for (unsigned i = 0; i < own.d.size(); ++i) {
            const unsigned row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const float before = own.adds ? *own.d[i] : 0.0f;
            if (eight) {
                *own.d[i] = sum_of_small(format, &small_a[row * depth], &small_b[column * depth], before);
                continue;
            }
            double sum = before;
            for (unsigned k = 0; k < depth; ++k) {
                sum += static_cast<double>(wide_a[row * depth + k]) * wide_b[column * depth + k];
            }
            *own.d[i] = static_cast<float>(sum);
        }
    }
}

inline unsigned own_warp() { return threadIdx.x / warp_size; }

inline void issue(void* const (&operands)[warp_size]) {
    std::vector<Product*> lanes;
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        auto* own = static_cast<Product*>(operands[lane]);
        if (block.late || slow & products) {
            pending[own_warp()][lane].push_back(*own);
        }
        lanes.push_back(own);
    }
    if (!block.late && !(slow & products)) {
        multiply(own_warp(), lanes);
    }
}

inline void wgmma(
    ptx::Format format, std::initializer_list<const std::uint32_t*> a, std::uint64_t left, std::uint64_t right,
    std::initializer_list<float*> d, bool major_n, bool adds
) {
    Product own{{}, left, right, d, major_n, adds, 0, format};
    std::copy(a.begin(), a.end(), own.a);
    own.group = groups[own_warp()];
    host::together(issue, &own);
}

inline void commit(void* const (&)[warp_size]) { ++groups[own_warp()]; }

struct Finish {
    int left;
};

// Carry out all but the warp's latest groups.
inline void finish(void* const (&operands)[warp_size]) {
    auto& warp = pending[own_warp()];
    const int before = groups[own_warp()] - static_cast<Finish*>(operands[0])->left;
    while (!warp[0].empty() && warp[0][0].group < before) {
        std::vector<Product*> lanes;
        for (auto& lane : warp) {
            lanes.push_back(&lane[0]);
        }
        multiply(own_warp(), lanes);
        for (auto& lane : warp) {
            lane.erase(lane.begin());
        }
    }
}

inline void complete(int left) {
    if (slow & products) {
        host::sleep(nap);
    }
    Finish how{left};
    host::together(finish, &how);
}

inline void start() {
    copies = 0;
    flying.clear();
    for (auto& meeting : meetings) {
        meeting = {};
    }
    for (auto& warp : pending) {
        for (auto& lane : warp) {
            lane.clear();
        }
    }
    std::fill(groups, groups + 32, 0);
}

template <typename Choose>
int reduce(int x, Choose) {
    host::together(
        [](void* const (&operands)[warp_size]) {
            int best = *static_cast<int*>(operands[0]);
            for (void* each : operands) {
                best = Choose{}(best, *static_cast<int*>(each));
            }
            for (void* each : operands) {
                *static_cast<int*>(each) = best;
            }
        },
        &x
    );
    return x;
}
struct Least {
    int operator()(int a, int b) const { return a < b ? a : b; }
};
struct Most {
    int operator()(int a, int b) const { return a < b ? b : a; }
};

}  // namespace hopper

inline int __reduce_min_sync(unsigned, int x) { return hopper::reduce(x, hopper::Least{}); }
inline int __reduce_max_sync(unsigned, int x) { return hopper::reduce(x, hopper::Most{}); }
inline int __shfl_sync(unsigned, int x, int from) { return static_cast<int>(ptx::shfl_idx(static_cast<unsigned>(x), from)); }
inline void __syncwarp() {}
#define __grid_constant__
