#pragma once

#include <cstdio>
#include <cstdlib>

// EXPERTD_CHECK(condition): a broken invariant of our own code ends the process with its place and
// text. Never for what comes from outside (requests, files, network): that is an absl::Status.
#define EXPERTD_CHECK(condition)                                                         \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
