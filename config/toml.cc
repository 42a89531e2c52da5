#include "config/toml.h"

#include <cstdint>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace expertd::toml {
namespace {

bool IsDigit(char c) { return '0' <= c && c <= '9'; }
bool IsBareKeyChar(char c) {
  return IsDigit(c) || ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || c == '-' || c == '_';
}
bool IsControl(char c) { return (static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7f; }

// Unicode scalar value -> UTF-8; false for surrogates and what lies beyond Unicode.
bool AppendUtf8(uint32_t point, std::string* out) {
  if (point > 0x10ffff || (0xd800 <= point && point <= 0xdfff)) return false;
  const auto tail = [&](int shift) {
    out->push_back(static_cast<char>(0x80 | ((point >> shift) & 0x3f)));
  };
  if (point < 0x80) {
    out->push_back(static_cast<char>(point));
  } else if (point < 0x800) {
    out->push_back(static_cast<char>(0xc0 | (point >> 6)));
    tail(0);
  } else if (point < 0x10000) {
    out->push_back(static_cast<char>(0xe0 | (point >> 12)));
    tail(6);
    tail(0);
  } else {
    out->push_back(static_cast<char>(0xf0 | (point >> 18)));
    tail(12);
    tail(6);
    tail(0);
  }
  return true;
}

// Reads one line from left to right. A method that fails has set error_.
class LineParser {
 public:
  explicit LineParser(std::string_view line) : rest_(line) {}

  // Blank lines and comments give true with an empty key.
  bool Read(Entry* entry) {
    SkipSpace();
    if (AtEnd()) return true;
    if (rest_.front() == '[') return Fail("tables are not supported: write key = value lines only");
    return ReadKey(&entry->key) && ReadValue(entry) && ReadEnd();
  }

  const std::string& error() const { return error_; }

 private:
  bool Fail(std::string message) {
    error_ = std::move(message);
    return false;
  }
  void SkipSpace() {
    while (!rest_.empty() && (rest_.front() == ' ' || rest_.front() == '\t'))
      rest_.remove_prefix(1);
  }
  bool AtEnd() const { return rest_.empty() || rest_.front() == '#'; }

  bool ReadKey(std::string* key) {
    while (!rest_.empty() && IsBareKeyChar(rest_.front())) {
      key->push_back(rest_.front());
      rest_.remove_prefix(1);
    }
    if (key->empty()) return Fail("expected a key of letters, digits, - and _");
    SkipSpace();
    if (rest_.empty() || rest_.front() != '=') return Fail(absl::StrCat("expected = after ", *key));
    rest_.remove_prefix(1);
    SkipSpace();
    return true;
  }

  bool ReadValue(Entry* entry) {
    if (AtEnd()) return Fail(absl::StrCat(entry->key, " has no value"));
    const char first = rest_.front();
    if (first == '"' || first == '\'') {
      entry->type = Type::kString;
      if (rest_.substr(0, 3) == "\"\"\"" || rest_.substr(0, 3) == "'''") {
        return Fail("strings over several lines are not supported");
      }
      rest_.remove_prefix(1);
      return first == '"' ? ReadBasicString(&entry->text) : ReadLiteralString(&entry->text);
    }
    return ReadWord(entry);
  }

  bool ReadWord(Entry* entry) {
    size_t length = rest_.find_first_of(" \t#");
    if (length == std::string_view::npos) length = rest_.size();
    const std::string_view word = rest_.substr(0, length);
    rest_.remove_prefix(length);
    if (word == "true" || word == "false") {
      entry->type = Type::kBoolean;
      entry->text = std::string(word.data(), word.size());
      return true;
    }
    entry->type = Type::kInteger;
    if (ReadInteger(word, &entry->text)) return true;
    return Fail(absl::StrCat(entry->key, ": got ", std::string(word),
                             ", expected a quoted string, a decimal integer, true or false"));
  }

  // [+-] digits without a leading zero, single underscores between digits.
  static bool ReadInteger(std::string_view word, std::string* text) {
    if (!word.empty() && (word.front() == '-' || word.front() == '+')) {
      if (word.front() == '-') text->push_back('-');
      word.remove_prefix(1);
    }
    if (word.empty() || !IsDigit(word.front()) || !IsDigit(word.back())) return false;
    if (word.front() == '0' && word.size() > 1) return false;
    for (size_t i = 0; i < word.size(); ++i) {
      if (word[i] == '_' && word[i - 1] != '_') continue;
      if (!IsDigit(word[i])) return false;
      text->push_back(word[i]);
    }
    return true;
  }

  bool ReadLiteralString(std::string* text) {
    while (!rest_.empty() && rest_.front() != '\'') {
      text->push_back(rest_.front());
      rest_.remove_prefix(1);
    }
    return CloseString();
  }

  bool ReadBasicString(std::string* text) {
    while (!rest_.empty() && rest_.front() != '"') {
      const char c = rest_.front();
      rest_.remove_prefix(1);
      if (c != '\\') {
        text->push_back(c);
      } else if (!ReadEscape(text)) {
        return false;
      }
    }
    return CloseString();
  }

  bool CloseString() {
    if (rest_.empty()) return Fail("a string is not closed");
    rest_.remove_prefix(1);
    return true;
  }

  bool ReadEscape(std::string* text) {
    static constexpr std::string_view kNames = "btnfr\"\\";
    static constexpr std::string_view kMeanings = "\b\t\n\f\r\"\\";
    const char name = rest_.empty() ? '\0' : rest_.front();
    if (!rest_.empty()) rest_.remove_prefix(1);
    if (const size_t at = kNames.find(name); at != std::string_view::npos) {
      text->push_back(kMeanings[at]);
      return true;
    }
    const size_t num_digits = name == 'u' ? 4 : name == 'U' ? 8 : 0;
    if (num_digits == 0) return Fail("unknown escape in a string; write \\\\ for a backslash");
    uint32_t point = 0;
    for (size_t i = 0; i < num_digits; ++i) {
      constexpr std::string_view kHex = "0123456789abcdef0123456789ABCDEF";
      const size_t digit = rest_.empty() ? std::string_view::npos : kHex.find(rest_.front());
      if (digit == std::string_view::npos)
        return Fail("an escape in a string has too few hex digits");
      point = point * 16 + digit % 16;
      rest_.remove_prefix(1);
    }
    return AppendUtf8(point, text) || Fail("an escape in a string is no Unicode character");
  }

  bool ReadEnd() {
    SkipSpace();
    return AtEnd() || Fail(absl::StrCat("unexpected text after the value: ", std::string(rest_)));
  }

  std::string_view rest_;
  std::string error_;
};

}  // namespace

absl::StatusOr<std::vector<Entry>> Parse(std::string_view toml, std::string_view file_name) {
  std::vector<Entry> entries;
  std::set<std::string> keys;
  int line_number = 0;
  const auto error = [&](const std::string& message) {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(file_name), ":", line_number, ": ", message));
  };
  while (!toml.empty()) {
    ++line_number;
    const size_t newline = toml.find('\n');
    std::string_view line = toml.substr(0, newline);
    toml.remove_prefix(newline == std::string_view::npos ? toml.size() : newline + 1);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    for (const char c : line) {
      if (IsControl(c)) return error("a control character; expected plain text");
    }
    Entry entry;
    entry.line = line_number;
    LineParser parser(line);
    if (!parser.Read(&entry)) return error(parser.error());
    if (entry.key.empty()) continue;
    if (!keys.insert(entry.key).second) return error(absl::StrCat(entry.key, " is given twice"));
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::string Quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted.push_back('\\');
      quoted.push_back(c);
    } else if (IsControl(c) || c == '\t') {
      absl::StrAppendFormat(&quoted, "\\u%04x", static_cast<unsigned char>(c));
    } else {
      quoted.push_back(c);
    }
  }
  quoted.push_back('"');
  return quoted;
}

}  // namespace expertd::toml
