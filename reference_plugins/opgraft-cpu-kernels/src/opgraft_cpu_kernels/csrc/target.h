// Compiles what stands between OPGRAFT_TARGET_BEGIN and OPGRAFT_TARGET_END for an instruction set that the rest of the
// library does not need. Headers of the standard library stand before it: a template of theirs compiled for AVX-512
// could replace, when the library is linked, the one that code for any CPU calls.
#pragma once

#define OPGRAFT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define OPGRAFT_TARGET_BEGIN(features) \
  OPGRAFT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define OPGRAFT_TARGET_END OPGRAFT_PRAGMA(clang attribute pop)
#else
#define OPGRAFT_TARGET_BEGIN(features) OPGRAFT_PRAGMA(GCC push_options) OPGRAFT_PRAGMA(GCC target(features))
#define OPGRAFT_TARGET_END OPGRAFT_PRAGMA(GCC pop_options)
#endif
