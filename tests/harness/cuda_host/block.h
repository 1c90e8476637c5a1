// One CUDA block at a time on the CPU: enough of CUDA C++ for a host compiler to run a kernel's own source.
//
// Every thread is a fiber.  It runs until it meets an operation of its warp (a shuffle, a matrix load or product), which is
// carried out once all 32 lanes have met it, or a barrier of the block.  Warps run one after the other, each as far as it can:
// no GPU is this unfair, so a barrier that is missing shows.  Shared memory begins as NaN.
#pragma once

#include "standard.h"

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Index {
    unsigned x;
};
inline Index threadIdx, blockIdx, gridDim;

using std::max;
using std::min;

inline float __int_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float __uint_as_float(std::uint32_t bits) { return __int_as_float(bits); }
inline std::uint32_t __float_as_uint(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }  // compiled with -ffp-contract=off
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsub_rn(float a, float b) { return a - b; }

constexpr int warp_size = 32;
constexpr unsigned shared_capacity = 227 << 10;  // of a block on sm_90
extern "C" {
inline __align__(1024) unsigned char shared[shared_capacity];
}

namespace host {

// What the lanes of a warp do together: called once, when all have arrived, with lane i's operands at operands[i].
using Operation = void (*)(void* const (&operands)[warp_size]);

struct Copy {
    unsigned to;
    const void* from;
    unsigned size;   // of the whole copy
    unsigned bytes;  // that are read; zeros follow
    int group;
    unsigned char there[16];  // what lay where it goes
};

struct Target {
    unsigned address, size;
};

enum class State { ready, at_warp, at_block, asleep, done };

struct Thread {
    ucontext_t start;  // where it begins
    jmp_buf place;     // where it goes on once it has begun
    bool begun;
    std::vector<char> stack;
    State state;
    Operation operation;
    void* operands;
    std::vector<Copy> copies;       // not yet landed
    int groups;                     // committed so far
    unsigned naps;                  // turns of the other warps until it wakes
    std::vector<Target> targets;    // of its copies since the last barrier
};

struct Block {
    std::vector<Thread> threads;
    Thread* current;
    jmp_buf scheduler;
    void (*body)(const void* arguments);
    const void* arguments;
    unsigned shared_bytes;
    bool late;  // copies land when they are waited for at last; else at once
    char error[200];
    long conflicts[2];  // accesses to shared memory that bank conflicts would repeat: matrix loads, copies
};
inline Block block;

inline void fail(const char* what, long detail) {
    if (!block.error[0]) {
        std::snprintf(block.error, sizeof block.error, "%s (%ld) in thread %u of block %u", what, detail, threadIdx.x, blockIdx.x);
    }
}

// Give way to the scheduler until it makes this thread ready again.
inline void pause(State state) {
    Thread* self = block.current;
    self->state = state;
    if (!_setjmp(self->place)) {
        _longjmp(block.scheduler, 1);
    }
}

// Run a thread until it gives way.  Jumps and not swapcontext, which asks the system for the signal
// mask every time.
inline void go_on(Thread& thread) {
    block.current = &thread;
    if (!_setjmp(block.scheduler)) {
        if (thread.begun) {
            _longjmp(thread.place, 1);
        }
        thread.begun = true;
        setcontext(&thread.start);
    }
}

// Let the other warps go on for some turns.
inline void sleep(unsigned naps) {
    block.current->naps = naps;
    pause(State::asleep);
}

inline void together(Operation operation, void* operands) {
    block.current->operation = operation;
    block.current->operands = operands;
    pause(State::at_warp);
}

// The bytes of shared memory at an address that `size` bytes are read from or written to.
inline unsigned char* shared_at(unsigned address, unsigned size = 16) {
    if (address % size || address + size > block.shared_bytes) {
        fail("a bad shared address", address);
        return shared;
    }
    return shared + address;
}

// Fail if anything but this copy, which has not landed, has written where it goes.
inline void check_way(const Copy& copy) {
    if (std::memcmp(shared_at(copy.to, copy.size), copy.there, copy.size) != 0) {
        fail("a write to where a copy is on its way", copy.to);
    }
}

inline void land(const Copy& copy) {
    unsigned char* to = shared_at(copy.to, copy.size);
    std::memset(to, 0, copy.size);
    if (copy.bytes) {
        std::memcpy(to, copy.from, copy.bytes);
    }
#ifdef BESIDE
    for (unsigned i = 0; i + 2 <= copy.bytes; i += 2) {
        if ((to[i] | to[i + 1] << 8) == BESIDE) {
            fail("a copy reads what lies beside a tensor", copy.bytes);
        }
    }
#endif
}

// Eight accesses of 16 bytes go together and need eight different sixteenths of the banks' 128 bytes.
inline void count_conflicts(long& conflicts, const unsigned (&addresses)[8]) {
    int uses[8] = {};
    for (unsigned address : addresses) {
        ++uses[address / 16 % 8];
    }
    conflicts += *std::max_element(uses, uses + 8) - 1;
}

inline void enter() {
    block.body(block.arguments);
    pause(State::done);
}

// Run a warp as far as it gets: to its end or to a barrier of the block.
inline void run_warp(Thread* lanes, unsigned first) {
    while (!block.error[0]) {
        for (int lane = 0; lane < warp_size; ++lane) {
            if (lanes[lane].state == State::ready) {
                threadIdx.x = first + lane;
                go_on(lanes[lane]);
            }
        }
        void* operands[warp_size];
        for (int lane = 0; lane < warp_size; ++lane) {
            const bool apart = lanes[lane].state == State::at_warp && lanes[lane].operation != lanes[0].operation;
            if (lanes[lane].state != lanes[0].state || apart) {
                fail("lanes of a warp have parted", lane);
                return;
            }
            operands[lane] = lanes[lane].operands;
        }
        if (lanes[0].state != State::at_warp) {
            return;
        }
        lanes[0].operation(operands);
        for (int lane = 0; lane < warp_size; ++lane) {
            lanes[lane].state = State::ready;
        }
    }
}

// One turn of the other warps has passed.
inline void wake_warp(Thread* lanes) {
    if (lanes[0].state == State::asleep && --lanes[0].naps == 0) {
        for (int lane = 0; lane < warp_size; ++lane) {
            lanes[lane].state = State::ready;
        }
    }
}

// Threads run one by one, but eight neighbours copy 16 bytes each together: those copies are counted
// when all have made theirs.
inline void count_copies() {
    for (std::size_t first = 0; first < block.threads.size(); first += 8) {
        for (std::size_t i = 0; i < block.threads[first].targets.size(); ++i) {
            unsigned addresses[8];
            bool all = true;
            for (int lane = 0; lane < 8; ++lane) {
                const auto& targets = block.threads[first + lane].targets;
                all = all && i < targets.size() && targets[i].size == 16;
                addresses[lane] = all ? targets[i].address : 0;
            }
            if (all) {
                count_conflicts(block.conflicts[1], addresses);
            }
        }
    }
    for (Thread& thread : block.threads) {
        thread.targets.clear();
    }
}

// Whether nothing was written behind the block's shared memory.
inline bool untouched_behind() {
    const unsigned char* behind = shared + block.shared_bytes;
    const unsigned count = sizeof shared - block.shared_bytes;
    return count == 0 || (*behind == 0xff && std::memcmp(behind, behind + 1, count - 1) == 0);
}

// Run one block: `backwards` lets the last warp go first.  Returns false after an error.
inline bool run_block(unsigned index, unsigned threads, bool backwards) {
    blockIdx.x = index;
    std::memset(shared, 0xff, sizeof shared);
    block.threads.resize(threads);
    for (Thread& thread : block.threads) {
        thread.stack.resize(1 << 16);
        thread.state = State::ready;
        thread.copies.clear();
        thread.groups = 0;
        thread.targets.clear();
        thread.begun = false;
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = thread.stack.data();
        thread.start.uc_stack.ss_size = thread.stack.size();
        thread.start.uc_link = nullptr;
        makecontext(&thread.start, enter, 0);
    }
    const unsigned warps = threads / warp_size;
    while (!block.error[0]) {
        bool asleep = true;
        while (asleep && !block.error[0]) {
            asleep = false;
            for (unsigned i = 0; i < warps; ++i) {
                const unsigned first = (backwards ? warps - 1 - i : i) * warp_size;
                wake_warp(&block.threads[first]);
                run_warp(&block.threads[first], first);
                asleep = asleep || block.threads[first].state == State::asleep;
            }
        }
        const State state = block.threads[0].state;
        for (Thread& thread : block.threads) {
            if (thread.state != state) {
                fail("threads of the block have parted", &thread - block.threads.data());
            }
            thread.state = State::ready;
        }
        count_copies();
        if (state == State::done) {
            for (const Thread& thread : block.threads) {
                for (const Copy& copy : thread.copies) {
                    check_way(copy);
                }
            }
            break;
        }
    }
    if (!untouched_behind()) {
        fail("a write behind the shared memory of the block", block.shared_bytes);
    }
    return !block.error[0];
}

}  // namespace host

// True for all lanes if it is for one; the mask is that of the whole warp.
inline bool __any_sync(unsigned, bool predicate) {
    host::together(
        [](void* const (&operands)[warp_size]) {
            bool any = false;
            for (void* each : operands) {
                any = any || *static_cast<bool*>(each);
            }
            for (void* each : operands) {
                *static_cast<bool*>(each) = any;
            }
        },
        &predicate
    );
    return predicate;
}

// As verify/sanitizers/delays.py has them; the seed is set before a run.
extern "C" {
inline unsigned delay_seed = 0;
}
#define DELAY_SEED delay_seed
#define DELAY_SLEEP(nanoseconds) host::sleep(1 + (nanoseconds) % 8)

inline void __syncthreads() { host::pause(host::State::at_block); }
