"""Classes of bugs that kernels had and that cannot be planted here, each with the reason."""

UNPLANTED: tuple[tuple[str, str], ...] = (
    (
        (
            "deadlocks: a consumer without a drain loop, warps that disagree on a split, a pipeline"
            " of depth 1 (flashinfer b701cee1d, d625ed4d0; flash-attention 3fa81057)"
        ),
        (
            "the interpreter runs one program at a time and has no barrier to wait at; the cell's"
            " deadline is tested with a kernel that hangs"
        ),
    ),
    (
        (
            "races: a barrier missing before shared memory is written again, copies not drained,"
            " stages hardcoded, fences, the order of a release (flash-attention 1c41d2b0, 188643b8,"
            " e540fc1b; xformers 55a4798d; flashinfer 843043b8b; llama.cpp PR #27870; triton"
            " #10211)"
        ),
        (
            "the interpreter has neither shared memory nor several warps; a missing barrier is"
            " planted into the PTX kernel for the sanitizers (tests/planted), and"
            " tests/meta/kernels/test_ptx_kernel.py runs its warps one after the other"
        ),
    ),
    (
        (
            "offsets in 32 bits: strides, page indices, accumulators, scheduler bytes (xformers"
            " 471569b4; flash-attention 6865e601, b62d93f3, 7052e212; flashinfer d885b71f3,"
            " ba3f32485; SageAttention #386)"
        ),
        "an offset beyond 2^31 elements needs a buffer of 4 GiB or more",
    ),
    (
        "launches that fail for want of shared memory (flash-attention 0bbb25a3)",
        (
            "the interpreter has no such limit; builds are compiled, and their shared memory is"
            " held against each architecture's"
        ),
    ),
    (
        (
            "page tables: a page that is assumed to last one iteration, a fully masked paged row"
            " (flashinfer 103fcf862)"
        ),
        "no problem has pages",
    ),
    ("ALiBi distances (vllm PR #945)", "no problem has a bias"),
    (
        (
            "attention sinks: left out of the maximum, or not shared (flash-attention 2f78d484, PR"
            " #2752)"
        ),
        "no problem has sinks",
    ),
    ("dropout with causal masks (pytorch PR #102038)", "no problem has dropout"),
    (
        "descriptors and swizzles of one instruction (triton PR #7043)",
        "the interpreter multiplies tiles, not descriptors",
    ),
    (
        (
            "scratch memory freed early, or reused by the allocator (flash-attention 1c275eb0, PR"
            " #2063)"
        ),
        (
            "the judge owns workspaces, so that a kernel cannot free them; one that is read before"
            " it is written is planted"
        ),
    ),
    (
        (
            "accumulation order that depends on garbage in padded accumulators (flash-attention PR"
            " #2337)"
        ),
        "needs atomics on memory that the launch before left; no shipped kernel has them",
    ),
    (
        (
            "rows whose bits depend on where blocks end, by exponentials that are both within what"
            " is declared (flash-attention c2006099)"
        ),
        (
            "no contract promises the same bits in another tile; with one outside its bound it is"
            " planted"
        ),
    ),
)
