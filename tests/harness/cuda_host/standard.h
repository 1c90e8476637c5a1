// The standard headers that block.h needs, in a file of their own: host_library.py compiles them once for all kernels.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp refuses to leave a stack for another

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>
