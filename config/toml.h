#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

// The subset of TOML that configuration files use: one `key = value` a line with bare keys, values
// that are basic or literal strings on one line, decimal integers, true or false; comments and
// blank lines. Tables, arrays, floats and dates are refused by name. What is accepted means the
// same in full TOML.
namespace expertd::toml {

enum class Type { kString, kInteger, kBoolean };

struct Entry {
  int line = 0;  // from 1
  std::string key;
  Type type = Type::kString;
  std::string text;  // strings without quotes and escapes, integers without underscores
};

// Entries in file order, keys unique. INVALID_ARGUMENT "file_name:line: ..." for the first mistake.
absl::StatusOr<std::vector<Entry>> Parse(std::string_view toml, std::string_view file_name);

// text as a basic string, with its quotes.
std::string Quote(std::string_view text);

}  // namespace expertd::toml
