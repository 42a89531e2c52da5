#include <gtest/gtest.h>

#include "tests/gpu/testing/child_process.h"

// A child takes its role before anything else runs.
int main(int argc, char** argv) {
  if (const auto status = expertd::testing::RunChildRole(argc, argv)) return *status;
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
