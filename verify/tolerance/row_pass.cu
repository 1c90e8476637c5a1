// What a bound asks of whole rows of pairs, in one pass over memory: one block of THREADS, a power
// of two, for each row.
//
// In torch each step is a pass of its own, over tensors that no cache holds.  The formulas are
// those of score_errors.py and weights.py; fp64 throughout.
constexpr int threads = THREADS;
constexpr double largest_number = 1.7976931348623157e308;

struct Arguments {
    const double* magnitudes;  // (rows, keys), like scores, weights, grown and upper
    const double* scores;
    const double* weights;  // P
    const double* common;   // (rows), like all below but grown and upper
    double a, b;            // the error of a score, or of an exponent beside `common`: a G + b |S|
    long long keys;
    double* largest;  // of an error, or of delta
    double* grown;    // P expm1(delta)
    double* upper;    // P + that
    double* total;    // the sum of P exp(-delta)
    double* moved;    // that of `grown`
    double* least;    // of `upper`
};

__device__ __forceinline__ double sum(double x, double y) { return x + y; }

// NaN if one of them is.
__device__ __forceinline__ double larger(double x, double y) { return y > x || y != y ? y : x; }

using Join = double (*)(double, double);

// Joins all threads' values, two at a time.  values: shared memory, one for each thread.
__device__ __forceinline__ double together(double value, double* values, Join join) {
    values[threadIdx.x] = value;
    __syncthreads();
    for (unsigned half = threads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            values[threadIdx.x] = join(values[threadIdx.x], values[threadIdx.x + half]);
        }
        __syncthreads();
    }
    const double found = values[0];
    __syncthreads();
    return found;
}

// |S|, and 0 where it is infinite, since it is masked.
__device__ __forceinline__ double size_of(double score) {
    const double size = score < 0 ? -score : score;
    return size > largest_number ? 0 : size;
}

// The largest error of each row.
extern "C" __global__ void largest_errors(const Arguments given) {
    extern __shared__ __align__(8) unsigned char shared[];
    double* values = reinterpret_cast<double*>(shared);
    const long long row = blockIdx.x, first = row * given.keys;
    double most = 0;
    for (long long at = first + threadIdx.x; at < first + given.keys; at += threads) {
        most = larger(most, given.a * given.magnitudes[at] + given.b * size_of(given.scores[at]));
    }
    most = together(most, values, larger);
    if (threadIdx.x == 0) {
        given.largest[row] = most;
    }
}

// Weights that move by delta = a G + b |S| + common, and what a row of them comes to.
extern "C" __global__ void moved_weights(const Arguments given) {
    extern __shared__ __align__(8) unsigned char shared[];
    double* values = reinterpret_cast<double*>(shared);
    const long long row = blockIdx.x, first = row * given.keys;
    const double common = given.common[row];
    double most = 0, total = 0, moved = 0, below = -largest_number;
    for (long long at = first + threadIdx.x; at < first + given.keys; at += threads) {
        const double error = given.a * given.magnitudes[at] + given.b * size_of(given.scores[at]);
        const double delta = error + common;
        const double p = given.weights[at], growth = expm1(delta), grown = growth * p;
        given.grown[at] = grown;
        given.upper[at] = p + grown;
        most = larger(most, delta);
        total += p / (growth + 1);
        moved += grown;
        below = larger(below, -(p + grown));
    }
    most = together(most, values, larger);
    total = together(total, values, sum);
    moved = together(moved, values, sum);
    below = together(below, values, larger);
    if (threadIdx.x == 0) {
        given.largest[row] = most;
        given.total[row] = total;
        given.moved[row] = moved;
        given.least[row] = -below;
    }
}
