// A kernel as a function: KERNEL is its file, ENTRY its name; it takes one structure, `Arguments`, by value.
#include KERNEL

// Runs the whole grid; returns what went wrong, or an empty string.  conflicts: two counters (matrix loads, copies).
extern "C" const char* run(
    const void* arguments, unsigned grid, unsigned threads, unsigned shared_bytes, bool backwards, bool late, long* conflicts
) {
    host::block = {};
    host::block.shared_bytes = shared_bytes;
    host::block.late = late;
    gridDim.x = grid;
    host::block.body = [](const void* given) { ENTRY(*static_cast<const Arguments*>(given)); };
    host::block.arguments = arguments;
    for (unsigned index = 0; index < grid && host::run_block(index, threads, backwards); ++index) {
    }
    std::copy(host::block.conflicts, host::block.conflicts + 2, conflicts);
    return host::block.error;
}
