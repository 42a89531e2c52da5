#pragma once

#include <string>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace expertd {

// A name from a file, fit for a message: control characters escaped, length bounded.
inline std::string Printable(std::string_view name) {
  constexpr size_t kMaxShown = 160;
  const std::string_view shown = name.substr(0, kMaxShown);
  std::string text = absl::Utf8SafeCEscape(absl::string_view(shown.data(), shown.size()));
  if (shown.size() < name.size()) text += "...";
  return text;
}

}  // namespace expertd
