#include "loader/shard_index.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "config/limits.h"
#include "loader/text.h"
#include "nlohmann/json.hpp"

namespace expertd {
namespace {

constexpr std::string_view kSuffix = ".safetensors";

bool IsPlainShardName(const std::string& name) {
  return name.size() > kSuffix.size() && name.size() <= 255 && name.ends_with(kSuffix) &&
         name.front() != '.' &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

// Keeps "weight_map", skips every other key of the top object whatever its depth.
class IndexHandler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::map<std::string, int32_t, std::less<>> files;  // numbered as they come
  std::vector<ShardIndex::Entry> entries;
  bool has_map = false;
  std::string error;

  bool null() override { return Scalar("null"); }
  bool boolean(bool /*value*/) override { return Scalar("a boolean"); }
  bool number_integer(number_integer_t /*value*/) override { return Scalar("a number"); }
  bool number_unsigned(number_unsigned_t /*value*/) override { return Scalar("a number"); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override {
    return Scalar("a number");
  }
  bool binary(binary_t& /*value*/) override { return Scalar("binary"); }

  bool string(string_t& value) override {
    if (!InMap()) return Scalar("a string");
    if (!IsPlainShardName(value)) {
      return Fail(absl::StrCat("weight_map: tensor ", Printable(tensor_), ": found file \"",
                               Printable(value),
                               "\", expected a plain file name inside the directory that ends in ",
                               std::string(kSuffix)));
    }
    const auto [it, inserted] = files.try_emplace(value, static_cast<int32_t>(files.size()));
    if (inserted && files.size() > static_cast<size_t>(limits::kMaxShards)) {
      return Fail(absl::StrCat("weight_map: found more than ", limits::kMaxShards,
                               " files, expected at most that"));
    }
    entries.push_back({std::move(tensor_), it->second});
    return true;
  }

  bool start_object(std::size_t /*size*/) override { return Open("an object"); }
  bool end_object() override { return Close(); }
  bool start_array(std::size_t /*size*/) override {
    if (depth_ == 0 || (depth_ == 1 && in_map_)) return Scalar("an array");
    return Open("an array");
  }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    if (depth_ == 1) {
      in_map_ = name == "weight_map";
      if (in_map_ && has_map) return Fail("weight_map: found twice, expected once");
      has_map = has_map || in_map_;
    } else if (InMap()) {
      if (name.find('\0') != std::string::npos) {
        return Fail(absl::StrCat("weight_map: tensor ", Printable(name),
                                 ": name: found a NUL character, expected none"));
      }
      tensor_ = name;
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*last_token*/,
                   const nlohmann::detail::exception& /*exception*/) override {
    return Fail(absl::StrCat("found text that is not valid UTF-8 JSON at byte ", position,
                             ", expected one object"));
  }

 private:
  bool InMap() const { return in_map_ && depth_ == 2; }

  bool Fail(std::string text) {
    if (error.empty()) error = std::move(text);
    return false;
  }

  bool Scalar(const char* found) {
    if (depth_ == 0) return Fail(absl::StrCat("found ", found, ", expected one object"));
    if (depth_ == 1 && in_map_) {
      return Fail(absl::StrCat("weight_map: found ", found, ", expected an object"));
    }
    if (InMap()) {
      return Fail(absl::StrCat("weight_map: tensor ", Printable(tensor_), ": found ", found,
                               ", expected a file name"));
    }
    return true;
  }

  bool Open(const char* found) {
    if (InMap()) return Scalar(found);
    ++depth_;
    return true;
  }

  bool Close() {
    --depth_;
    return true;
  }

  int64_t depth_ = 0;
  bool in_map_ = false;  // the key of the top object that was read last is weight_map
  std::string tensor_;
};

}  // namespace

int64_t ShardIndex::Find(std::string_view tensor) const {
  const auto it = std::lower_bound(
      entries.begin(), entries.end(), tensor,
      [](const Entry& entry, std::string_view name) { return entry.tensor < name; });
  return it != entries.end() && it->tensor == tensor ? it - entries.begin() : -1;
}

absl::StatusOr<ShardIndex> ParseShardIndex(std::string_view json) {
  if (json.find('\0') != std::string_view::npos) {
    return absl::InvalidArgumentError("found a NUL byte, expected JSON text");
  }
  IndexHandler handler;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return absl::InvalidArgumentError(handler.error);
  }
  if (!handler.has_map)
    return absl::InvalidArgumentError("weight_map: missing, expected an object");
  if (handler.entries.empty()) {
    return absl::InvalidArgumentError("weight_map: found no tensor, expected some");
  }

  ShardIndex index;
  std::vector<int32_t> rank_of(handler.files.size());  // number as it came -> place when sorted
  for (const auto& [name, number] : handler.files) {
    rank_of[static_cast<size_t>(number)] = static_cast<int32_t>(index.files.size());
    index.files.push_back(name);
  }
  index.entries = std::move(handler.entries);
  for (ShardIndex::Entry& entry : index.entries) {
    entry.file = rank_of[static_cast<size_t>(entry.file)];
  }
  std::sort(index.entries.begin(), index.entries.end(),
            [](const auto& a, const auto& b) { return a.tensor < b.tensor; });
  for (size_t i = 1; i < index.entries.size(); ++i) {
    if (index.entries[i].tensor == index.entries[i - 1].tensor) {
      return absl::InvalidArgumentError(absl::StrCat(
          "weight_map: tensor ", Printable(index.entries[i].tensor), ": found twice (",
          index.files[static_cast<size_t>(index.entries[i - 1].file)], ", ",
          index.files[static_cast<size_t>(index.entries[i].file)], "), expected once"));
    }
  }
  return index;
}

}  // namespace expertd
