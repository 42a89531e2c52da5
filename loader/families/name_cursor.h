#pragma once

#include <cstdint>
#include <string_view>

namespace expertd {

// Eats a tensor name from the left. Every method leaves the rest alone when it answers false.
class NameCursor {
 public:
  explicit NameCursor(std::string_view text) : rest_(text) {}

  bool Eat(std::string_view literal) {
    if (!rest_.starts_with(literal)) return false;
    rest_.remove_prefix(literal.size());
    return true;
  }

  // A decimal number as writers print it: no sign, no leading zero, at most nine digits.
  bool EatNumber(int32_t* number) {
    size_t digits = 0;
    int32_t value = 0;
    while (digits < rest_.size() && digits < 10 && rest_[digits] >= '0' && rest_[digits] <= '9') {
      if (digits < 9) value = value * 10 + (rest_[digits] - '0');
      ++digits;
    }
    if (digits == 0 || digits > 9 || (digits > 1 && rest_[0] == '0')) return false;
    rest_.remove_prefix(digits);
    *number = value;
    return true;
  }

  std::string_view rest() const { return rest_; }
  bool done() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

}  // namespace expertd
