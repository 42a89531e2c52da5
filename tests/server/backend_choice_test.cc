#include "server/backend_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "config/server_config.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;

TEST(ResolveBackend, TheCpuServesWithOneRankOrAsManyAsAskedFor) {
  ServerConfig config;
  config.backend = BackendKind::kCpu;
  EXPECT_EQ(ResolveBackend(config).value().ranks, 1);
  config.ranks = 3;
  const ServerConfig resolved = ResolveBackend(config).value();
  EXPECT_EQ(resolved.backend, BackendKind::kCpu);
  EXPECT_EQ(resolved.ranks, 3);
}

// With GPUs the number is wrong, without them there are none: either way it is an error.
TEST(ResolveBackend, NamedGpusThatAreNotThereAreNotReplacedByTheCpu) {
  for (const BackendKind backend : {BackendKind::kAuto, BackendKind::kCuda}) {
    ServerConfig config;
    config.backend = backend;
    config.devices = {255};
    const absl::StatusOr<ServerConfig> resolved = ResolveBackend(config);
    ASSERT_FALSE(resolved.ok());
    EXPECT_THAT(std::string(resolved.status().message()), HasSubstr("backend: "));
  }
}

}  // namespace
}  // namespace expertd
