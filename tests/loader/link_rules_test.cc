#include "loader/link_rules.h"

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/checkpoint.h"
#include "tests/testing/safetensors_builder.h"

// Which links a checkpoint's files may be, as opening one shows it.
namespace expertd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kShard0;
using testing::kShard1;
using testing::TempDir;
using testing::TestCheckpoint;

class LinkRulesTest : public ::testing::Test {
 protected:
  TempDir dir_;
};

TEST_F(LinkRulesTest, LinkOutOfTheDirectoryNeedsTheFlag) {
  TempDir elsewhere;
  TestCheckpoint::Mxfp4().Write(dir_.path());
  fs::rename(dir_.path() / kShard1, elsewhere.path() / kShard1);
  fs::create_symlink(elsewhere.path() / kShard1, dir_.path() / kShard1);
  const std::string message(Checkpoint::Open(dir_.path()).status().message());
  EXPECT_THAT(message, AllOf(HasSubstr(kShard1), HasSubstr("found a link to"),
                             HasSubstr("--allow-symlinks")));
  CheckpointOptions options;
  options.allow_symlinks = true;
  EXPECT_TRUE(Checkpoint::Open(dir_.path(), options).ok());
}

TEST_F(LinkRulesTest, LinkedConfigIsHeldToTheSameRule) {
  TempDir elsewhere;
  TestCheckpoint::Mxfp4().Write(dir_.path());
  fs::rename(dir_.path() / "config.json", elsewhere.path() / "config.json");
  fs::create_symlink(elsewhere.path() / "config.json", dir_.path() / "config.json");
  EXPECT_THAT(std::string(Checkpoint::Open(dir_.path()).status().message()),
              HasSubstr("--allow-symlinks"));
}

TEST_F(LinkRulesTest, LinkInsideTheDirectoryIsFollowed) {
  TestCheckpoint::Mxfp4().Write(dir_.path());
  fs::create_directory(dir_.path() / "data");
  fs::rename(dir_.path() / kShard1, dir_.path() / "data" / "x");
  fs::create_symlink("data/x", dir_.path() / kShard1);
  EXPECT_TRUE(Checkpoint::Open(dir_.path()).ok());
}

TEST_F(LinkRulesTest, DanglingLinkIsMissing) {
  TestCheckpoint::Mxfp4().Write(dir_.path());
  fs::remove(dir_.path() / kShard1);
  fs::create_symlink("nowhere", dir_.path() / kShard1);
  EXPECT_THAT(std::string(Checkpoint::Open(dir_.path()).status().message()),
              AllOf(HasSubstr("missing"), HasSubstr("nowhere")));
}

TEST_F(LinkRulesTest, OptionalFileThatLeadsNowhereIsNotTakenForAbsent) {
  TestCheckpoint::Mxfp4().Write(dir_.path());
  fs::create_symlink("blob-not-downloaded", dir_.path() / "hf_quant_config.json");
  EXPECT_THAT(std::string(Checkpoint::Open(dir_.path()).status().message()),
              AllOf(HasSubstr("hf_quant_config.json: missing, found a link to"),
                    HasSubstr("blob-not-downloaded")));
}

TEST_F(LinkRulesTest, IndexThatMayNotBeReadIsTheOnlyProblem) {
  TempDir elsewhere;
  TestCheckpoint::Mxfp4().Write(dir_.path());
  const char name[] = "model.safetensors.index.json";
  fs::rename(dir_.path() / name, elsewhere.path() / name);
  fs::create_symlink(elsewhere.path() / name, dir_.path() / name);
  Problems problems;
  Checkpoint::Examine(dir_.path(), {}, &problems);
  ASSERT_EQ(problems.count(), 1);
  EXPECT_THAT(problems.lines().front(), AllOf(HasSubstr(name), HasSubstr("--allow-symlinks")));
}

// models--org--name/{blobs/HASH..., snapshots/REV/FILE -> ../../blobs/HASH}
class HuggingFaceCacheTest : public LinkRulesTest {
 protected:
  void SetUp() override {
    repository_ = dir_.path() / "models--org--Some-Model";
    snapshot_ = repository_ / "snapshots" / "0123abc";
    fs::create_directories(snapshot_);
    fs::create_directories(repository_ / "blobs");
    TestCheckpoint::Mxfp4().Write(snapshot_);
    int number = 0;
    for (const char* name : {kShard0, kShard1, "config.json", "model.safetensors.index.json"}) {
      const std::string blob = absl::StrCat("blob", number++);
      fs::rename(snapshot_ / name, repository_ / "blobs" / blob);
      fs::create_symlink(fs::path("../../blobs") / blob, snapshot_ / name);
    }
  }

  fs::path repository_, snapshot_;
};

TEST_F(HuggingFaceCacheTest, SnapshotWithLinksIntoBlobsIsServed) {
  const auto checkpoint = Checkpoint::Open(snapshot_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->model_name(), "Some-Model");
}

TEST_F(HuggingFaceCacheTest, BlobsOfAnotherRepositoryAreRefused) {
  const fs::path other = dir_.path() / "models--org--other" / "blobs";
  fs::create_directories(other);
  fs::rename(repository_ / "blobs" / "blob1", other / "blob1");
  fs::remove(snapshot_ / kShard1);
  fs::create_symlink(other / "blob1", snapshot_ / kShard1);
  EXPECT_THAT(std::string(Checkpoint::Open(snapshot_).status().message()),
              HasSubstr("--allow-symlinks"));
}

TEST_F(HuggingFaceCacheTest, BlobThatIsItselfALinkOutIsRefused) {
  TempDir elsewhere;
  fs::rename(repository_ / "blobs" / "blob1", elsewhere.path() / "blob1");
  fs::create_symlink(elsewhere.path() / "blob1", repository_ / "blobs" / "blob1");
  EXPECT_THAT(std::string(Checkpoint::Open(snapshot_).status().message()),
              HasSubstr("--allow-symlinks"));
}

}  // namespace
}  // namespace expertd
