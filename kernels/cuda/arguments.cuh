// What a forward kernel in CUDA C++ is launched with; family.py fills the same structure.
#pragma once

// Row r of head h of batch b begins at data + b * batch + h * head + r * row.
template <class Element>
struct Strided {
    Element* data;
    long long batch, head, row;
};

// The factor of head h of batch b is data[b * batch + h * head], or 1 if data is null.
struct Factors {
    const float* data;
    long long batch, head;
};

template <class Element>
struct ArgumentsOf {
    Strided<Element> q, k, v, out;
    float* lse;                      // (batch, heads_q, seqlen_q), contiguous
    const int *row_low, *row_high;   // (batch, seqlen_q), contiguous: a row sees keys [low, high)
    int heads_q;
    int group;                       // query heads per key head
    int seqlen_q;
    int seqlen_kv;
    int diagonal_low;                // row r sees keys r + diagonal_low ... r + diagonal_high
    int diagonal_high;
    float q_factor;                  // what Q is multiplied by, before scores are by scale_log2
    float scale_log2;
    Factors descale_q, descale_k, descale_v;  // of key heads
};
