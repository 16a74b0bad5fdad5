// What each path includes first: everything of the standard library, before any target is set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(OPGRAFT_AMX)
#include <cpuid.h>
#endif

#include "target.h"

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
