// An instruction or function of one argument (or two) against fp64, over a range of inputs: what
// verify.probes.functions lists.
//
// FUNCTION(x): of ptx.cuh, ptx_probes.cuh or CUDA, or of two arguments FUNCTION(x, z).  REFERENCE:
// the same in fp64.  WIDTH: 32 for fp32; 16 for a pair in one register, PRECISION 11 for fp16 or 8
// for bf16.  ARGUMENTS: 1, inputs are bit patterns in their order; 2, sampled pairs.
// ABSOLUTE_NEAR_ONE: 1 where inputs in (0.5, 2) count in the absolute error alone, and others not
// in it.  DIRECTION: 1 if the function increases, -1 if it decreases on either side of zero, 0 if
// neither is looked at.
//
// fp64's own functions err by at most 2 of its ulp (CUDA C++ Programming Guide, mathematical
// functions), 2^-28 ulp of fp32.
#include "ptx_probes.cuh"

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int emin = PRECISION == 11 ? -14 : -126;

// Of what one thread saw: errors |y - r|, and where; r is the reference.  ulp: in units of the last place of r, over normal
// numbers; subnormals of either side apart.
struct Record {
    double ulp, relative, absolute, ratio, input_ulp, result_ulp;
    u64 ulp_at, relative_at, absolute_at, ratio_at, input_at, result_at;
    u64 wrong, wrong_at;            // NaN where r is none, or the other way round
    u64 unordered, unordered_at;    // results that fall where the function rises
    u64 apart, apart_at;            // the two results of a pair differ
    u64 inputs, inputs_flushed;     // subnormal inputs, and those that gave zero's result where that is 4 ulp off or more
    u64 results, results_flushed;   // subnormal results beyond half the smallest, and those that came out as zero
};

struct Bound {
    double error, slope, absolute;  // |y - r| <= (error + slope |x|) |r| + absolute
};

struct Arguments {
    u64 first, count, per_thread;  // inputs
    Record* records;               // of `survey`, one per thread
    Bound bound;
    const u32* x;  // of `values`, `count` of each: bits, in the lower half where WIDTH is 16
    const u32* z;
    u32* y;
};

__device__ __forceinline__ double reciprocal(double x) { return 1 / x; }
__device__ __forceinline__ double quotient(double x, double z) { return x / z; }

__device__ __forceinline__ double from_bits(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }
__device__ __forceinline__ u64 to_bits(double x) { return static_cast<u64>(__double_as_longlong(x)); }
__device__ __forceinline__ double power(int exponent) { return from_bits(static_cast<u64>(exponent + 1023) << 52); }

// The value of a bit pattern.
__device__ __forceinline__ double widen(u32 bits) {
#if WIDTH == 32
    return __uint_as_float(bits);
#elif PRECISION == 8
    return __uint_as_float(bits << 16);
#else
    const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double infinity = from_bits(0x7ffull << 52);
    double size = exponent == 0 ? fraction * power(-24) : (fraction + 1024) * power(static_cast<int>(exponent) - 25);
    if (exponent == 31) {
        size = fraction ? infinity - infinity : infinity;
    }
    return bits >> 15 ? -size : size;
#endif
}

// The result's bits; for a pair, both halves.
__device__ __forceinline__ u32 evaluate(u32 x, u32 z) {
#if ARGUMENTS == 2
    return __float_as_uint(FUNCTION(__uint_as_float(x), __uint_as_float(z)));
#elif WIDTH == 32
    return __float_as_uint(FUNCTION(__uint_as_float(x)));
#else
    return FUNCTION(x | x << 16);
#endif
}

__device__ __forceinline__ u32 low(u32 y) { return WIDTH == 32 ? y : y & 0xffff; }
__device__ __forceinline__ bool is_nan(double x) { return x != x; }
__device__ __forceinline__ double size_of(double x) { return from_bits(to_bits(x) & ~(1ull << 63)); }

// The last place of r, and r's distance from y in it; infinity counts as the next power of two.
__device__ __forceinline__ int exponent_of(double r) {
    const int exponent = static_cast<int>(to_bits(r) >> 52 & 0x7ff) - 1023;
    return exponent < emin ? emin : exponent;
}

__device__ __forceinline__ double clamped(double x) {
    const double limit = power(1 - emin + 1);
    return x > limit ? limit : x < -limit ? -limit : x;
}

// A well mixed word of a counter (Steele, Lea, Flood, 2014: splitmix64).
__device__ __forceinline__ u64 mixed(u64 counter) {
    u64 word = counter * 0x9e3779b97f4a7c15ull;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9ull;
    word = (word ^ word >> 27) * 0x94d049bb133111ebull;
    return word ^ word >> 31;
}

__device__ __forceinline__ void note(double value, u64 at, double& most, u64& where) {
    if (value > most) {
        most = value;
        where = at;
    }
}

__device__ __forceinline__ void count(bool happened, u64 at, u64& times, u64& where) {
    if (happened) {
        where = times ? where : at;
        ++times;
    }
}

__device__ void judge(u64 at, u32 bits, u32 other, u32 y, const Bound& bound, Record& record) {
    const double x = widen(bits), value = widen(low(y));
#if ARGUMENTS == 2
    const double z = widen(other), r = REFERENCE(x, z);
    const double largest = size_of(z);
    if (!(largest >= power(-126) && largest <= power(126)) || !(size_of(x) <= power(127) * 2)) {
        return;  // the documented domain
    }
#else
    const double r = REFERENCE(x);
#endif
    const bool subnormal = x != 0 && size_of(x) < power(emin);
    const bool as_zero = subnormal && low(y) == low(evaluate(bits >> (WIDTH - 1) << (WIDTH - 1), other));
    // The logarithm of a negative subnormal is NaN, or that of -0.
    count(is_nan(value) != is_nan(r) && !as_zero, at, record.wrong, record.wrong_at);
    if (is_nan(r) || is_nan(value)) {
        record.inputs += subnormal && is_nan(value) != is_nan(r);
        record.inputs_flushed += as_zero && is_nan(value) != is_nan(r);
        return;
    }
    const double size = size_of(r), error = size_of(clamped(value) - clamped(r));
    const double ulps = error * power(PRECISION - 1 - exponent_of(clamped(r)));
    if (subnormal) {
        ++record.inputs;
        record.inputs_flushed += as_zero && ulps >= 4;
        note(ulps, at, record.input_ulp, record.input_at);
        return;
    }
    if (size != 0 && size < power(emin)) {
        const bool seen = size > power(emin - PRECISION);
        record.results += seen;
        record.results_flushed += seen && value == 0;
        if (value != 0) {
            note(ulps, at, record.result_ulp, record.result_at);
        }
        return;
    }
    const double allowed = (bound.error + bound.slope * size_of(x)) * clamped(size) + bound.absolute;
    note(error == 0 ? 0 : error / allowed, at, record.ratio, record.ratio_at);
    const bool near_one = x > 0.5 && x < 2;
    if (near_one || !ABSOLUTE_NEAR_ONE) {
        note(error, at, record.absolute, record.absolute_at);
    }
    if (near_one && ABSOLUTE_NEAR_ONE) {
        return;
    }
    note(ulps, at, record.ulp, record.ulp_at);
    note(size == 0 ? 0 : error / clamped(size), at, record.relative, record.relative_at);
}

extern "C" __global__ void __launch_bounds__(128) survey(const Arguments args) {
    const u64 thread = static_cast<u64>(blockIdx.x) * 128 + threadIdx.x;
    const u64 begin = thread * args.per_thread;
    const u64 last = begin + args.per_thread;
    const u64 end = last < args.count ? last : args.count;
    Record record = {};
#if ARGUMENTS == 1
    double before = from_bits(0x7ff8ull << 48);
#endif
    for (u64 i = begin; i < end; ++i) {
        const u64 at = args.first + i;
#if ARGUMENTS == 2
        const u32 bits = static_cast<u32>(mixed(2 * at + 1)), other = static_cast<u32>(mixed(2 * at + 2));
        judge(at, bits, other, evaluate(bits, other), args.bound, record);
#else
        const u32 bits = static_cast<u32>(at);
        const u32 sign = bits >> (WIDTH - 1);
        if (i == begin && bits << 1 << (32 - WIDTH)) {  // the pattern before is of the same sign: another thread's last
            before = widen(low(evaluate(bits - 1, 0)));
        }
        const u32 y = evaluate(bits, 0);
        const double value = widen(low(y));
        judge(at, bits, 0, y, args.bound, record);
        count(WIDTH == 16 && low(y) != y >> 16, at, record.apart, record.apart_at);
        // Magnitudes grow with the bits; false where one of them is NaN.
        if (bits << 1 << (32 - WIDTH)) {
            const double rise = sign ? before - value : value - before;
            count(DIRECTION * rise < 0, at, record.unordered, record.unordered_at);
        }
        before = value;
#endif
    }
    args.records[thread] = record;
}

extern "C" __global__ void __launch_bounds__(128) values(const Arguments args) {
    const u64 i = static_cast<u64>(blockIdx.x) * 128 + threadIdx.x;
    if (i < args.count) {
        args.y[i] = evaluate(args.x[i], ARGUMENTS == 2 ? args.z[i] : 0);
    }
}
