#include "loader/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/limits.h"
#include "loader/text.h"
#include "nlohmann/json.hpp"

namespace expertd {
namespace {

struct TypeRow {
  std::string_view name;
  int bits;
};

// In the order of TensorType.
constexpr std::array<TypeRow, 22> kTypes = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"U16", 16},    {"I16", 16},    {"F16", 16},    {"BF16", 16},
    {"U32", 32},        {"I32", 32},    {"F32", 32},    {"U64", 64},    {"I64", 64},
    {"F64", 64},        {"C64", 64},
}};
static_assert(kTypes.size() == static_cast<size_t>(TensorType::kC64) + 1);

constexpr char kMetadataKey[] = "__metadata__";

absl::Status Invalid(const std::string& text) { return absl::InvalidArgumentError(text); }

// Events of the JSON parser -> tensors with offsets relative to the data. A SAX handler because a
// DOM would silently keep the last of two equal keys.
class HeaderHandler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<TensorInfo> tensors;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;  // [begin, end) of tensors[i]
  std::string error;

  bool null() override { return Unexpected("null"); }
  bool boolean(bool /*value*/) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override { return Unexpected(absl::StrCat(value)); }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return Unexpected(Printable(text));
  }
  bool binary(binary_t& /*value*/) override { return Unexpected("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::kShape) {
      if (tensors.back().shape.size() == limits::kMaxTensorRank) {
        return Fail(absl::StrCat(Where(), ": found more than ", limits::kMaxTensorRank,
                                 " dimensions, expected at most that"));
      }
      tensors.back().shape.push_back(value);
      return true;
    }
    if (state_ == State::kOffsets && num_offsets_ < 2) {
      (num_offsets_++ == 0 ? ranges.back().first : ranges.back().second) = value;
      return true;
    }
    return Unexpected(absl::StrCat(value));
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadata) return true;
    if (state_ != State::kTensor || field_ != "dtype") return Unexpected("a string");
    const std::optional<TensorType> type = ParseTensorType(value);
    if (!type) {
      return Fail(absl::StrCat(Where(), ": found \"", Printable(value),
                               "\", expected a type of the format such as U8 or F8_E4M3"));
    }
    tensors.back().type = *type;
    field_.clear();
    return true;
  }

  bool start_object(std::size_t /*size*/) override {
    if (state_ == State::kStart) {
      state_ = State::kTop;
    } else if (state_ == State::kTop) {
      state_ = in_metadata_ ? State::kMetadata : State::kTensor;
    } else {
      return Unexpected("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    if (state_ == State::kTop) return StartEntry(name);
    if (state_ == State::kTensor) return StartField(name);
    return true;  // a key of the metadata, whose values are free text
  }

  bool end_object() override {
    if (state_ == State::kTensor) {
      if (seen_fields_ != 7) {
        return Fail(absl::StrCat(Where(), ": found no ", MissingFields(),
                                 ", expected dtype, shape and data_offsets"));
      }
      state_ = State::kTop;
    } else if (state_ == State::kMetadata) {
      state_ = State::kTop;
    } else {
      state_ = State::kEnd;
    }
    return true;
  }

  bool start_array(std::size_t /*size*/) override {
    if (state_ == State::kTensor && field_ == "shape") {
      state_ = State::kShape;
    } else if (state_ == State::kTensor && field_ == "data_offsets") {
      state_ = State::kOffsets;
      num_offsets_ = 0;
    } else {
      return Unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (state_ == State::kOffsets && num_offsets_ != 2) {
      return Fail(absl::StrCat(Where(), ": found ", num_offsets_, " numbers, expected 2"));
    }
    state_ = State::kTensor;
    field_.clear();
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*last_token*/,
                   const nlohmann::detail::exception& /*exception*/) override {
    return Fail(absl::StrCat("header: found text that is not valid UTF-8 JSON at byte ", position,
                             ", expected one JSON object"));
  }

 private:
  enum class State { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };

  bool Fail(std::string text) {
    if (error.empty()) error = std::move(text);
    return false;
  }

  bool Unexpected(const std::string& found) {
    return Fail(absl::StrCat(Where(), ": found ", found, ", expected ", Expected()));
  }

  std::string Where() const {
    if (state_ == State::kStart) return "header";
    if (in_metadata_) return kMetadataKey;
    std::string text = absl::StrCat("tensor ", Printable(tensors.back().name));
    if (!field_.empty()) absl::StrAppend(&text, ": ", field_);
    return text;
  }

  std::string Expected() const {
    switch (state_) {
      case State::kMetadata:
        return "strings";
      case State::kTensor:
        return field_ == "dtype" ? "a string" : "an array";
      case State::kShape:
        return "whole numbers >= 0";
      case State::kOffsets:
        return "two whole numbers >= 0";
      default:
        return "an object";
    }
  }

  std::string MissingFields() const {
    std::vector<std::string> missing;
    if (!(seen_fields_ & 1)) missing.push_back("dtype");
    if (!(seen_fields_ & 2)) missing.push_back("shape");
    if (!(seen_fields_ & 4)) missing.push_back("data_offsets");
    return absl::StrJoin(missing, ", ");
  }

  bool StartEntry(const std::string& name) {
    in_metadata_ = name == kMetadataKey;
    if (in_metadata_) {
      if (seen_metadata_) return Fail(absl::StrCat(kMetadataKey, ": found twice, expected once"));
      seen_metadata_ = true;
      return true;
    }
    tensors.push_back(TensorInfo{.name = name});
    ranges.emplace_back(0, 0);
    seen_fields_ = 0;
    field_.clear();
    if (name.find('\0') != std::string::npos) {
      return Fail(absl::StrCat(Where(), ": name: found a NUL character, expected none"));
    }
    return true;
  }

  bool StartField(const std::string& name) {
    const int bit = name == "dtype" ? 1 : name == "shape" ? 2 : name == "data_offsets" ? 4 : 0;
    field_.clear();
    if (bit == 0) {
      return Fail(absl::StrCat(Where(), ": found the key \"", Printable(name),
                               "\", expected dtype, shape or data_offsets"));
    }
    if (seen_fields_ & bit) {
      return Fail(absl::StrCat(Where(), ": ", name, ": found twice, expected once"));
    }
    seen_fields_ |= bit;
    field_ = name;
    return true;
  }

  State state_ = State::kStart;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  int seen_fields_ = 0;  // bits: dtype, shape, data_offsets
  std::string field_;    // whose value comes next
  int num_offsets_ = 0;
};

absl::Status CheckNamesUnique(const std::vector<TensorInfo>& tensors) {
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return tensors[a].name < tensors[b].name; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (tensors[order[i]].name == tensors[order[i - 1]].name) {
      return Invalid(absl::StrCat("tensor ", Printable(tensors[order[i]].name),
                                  ": name: found twice, expected once"));
    }
  }
  return absl::OkStatus();
}

// Bytes of shape x type.
absl::StatusOr<uint64_t> SizeOf(const TensorInfo& tensor) {
  const uint64_t bits_per_value = static_cast<uint64_t>(TensorTypeBits(tensor.type));
  uint64_t count = 1;
  uint64_t bits = 0;
  bool fits = true;
  for (const uint64_t dim : tensor.shape)
    fits = fits && !__builtin_mul_overflow(count, dim, &count);
  fits = fits && !__builtin_mul_overflow(count, bits_per_value, &bits);
  const auto what = [&] {
    return absl::StrCat("tensor ", Printable(tensor.name), ": shape: found ",
                        ShapeText(tensor.shape), " of ", std::string(TensorTypeName(tensor.type)));
  };
  if (!fits) return Invalid(absl::StrCat(what(), ", expected a size in bits below 2^64"));
  if (bits % 8 != 0) {
    return Invalid(absl::StrCat(what(), " = ", bits, " bits, expected whole bytes"));
  }
  return bits / 8;
}

// Sorted by begin, the ranges must tile the data area, each with the size of its shape.
absl::StatusOr<std::vector<TensorInfo>> PlaceTensors(HeaderHandler parsed, uint64_t data_start,
                                                     uint64_t file_bytes) {
  std::vector<uint32_t> order(parsed.tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return parsed.ranges[a] < parsed.ranges[b]; });
  std::vector<TensorInfo> placed;
  placed.reserve(order.size());
  uint64_t next = 0;
  for (const uint32_t i : order) {
    TensorInfo& tensor = parsed.tensors[i];
    const auto [begin, end] = parsed.ranges[i];
    const std::string where = absl::StrCat("tensor ", Printable(tensor.name),
                                           ": data_offsets: found [", begin, ", ", end, "]");
    if (end < begin) return Invalid(absl::StrCat(where, ", expected end >= begin"));
    if (begin != next) {
      return Invalid(absl::StrCat(
          where, ", expected begin ", next, " (",
          begin < next ? "overlaps the tensor before" : "a gap behind the tensor before", ")"));
    }
    const absl::StatusOr<uint64_t> bytes = SizeOf(tensor);
    if (!bytes.ok()) return bytes.status();
    if (end - begin != *bytes) {
      return Invalid(absl::StrCat(where, " = ", end - begin, " bytes, expected ", *bytes, " for ",
                                  std::string(TensorTypeName(tensor.type)), " ",
                                  ShapeText(tensor.shape)));
    }
    tensor.offset = data_start + begin;  // checked below: end <= file_bytes - data_start
    tensor.bytes = *bytes;
    next = end;
    placed.push_back(std::move(tensor));
  }
  if (next != file_bytes - data_start) {
    return Invalid(absl::StrCat("file length: found ", file_bytes, " bytes, expected ", data_start,
                                " (header) + ", next, " (end of the last tensor)"));
  }
  return placed;
}

}  // namespace

std::string_view TensorTypeName(TensorType type) { return kTypes[static_cast<size_t>(type)].name; }

int TensorTypeBits(TensorType type) { return kTypes[static_cast<size_t>(type)].bits; }

std::optional<TensorType> ParseTensorType(std::string_view name) {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].name == name) return static_cast<TensorType>(i);
  }
  return std::nullopt;
}

std::string ShapeText(absl::Span<const uint64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<uint64_t> SafetensorsHeaderBytes(absl::Span<const uint8_t> first_bytes,
                                                uint64_t file_bytes) {
  if (file_bytes < 8 || first_bytes.size() < 8) {
    return Invalid(absl::StrCat("file length: found ", file_bytes,
                                " bytes, expected at least 8 for the header's length"));
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | first_bytes[static_cast<size_t>(i)];
  if (length > limits::kMaxSafetensorsHeaderBytes) {
    return Invalid(absl::StrCat("header length: found ", length, ", expected at most ",
                                limits::kMaxSafetensorsHeaderBytes));
  }
  if (length > file_bytes - 8) {
    return Invalid(absl::StrCat("header length: found ", length, ", expected at most ",
                                file_bytes - 8, " (the file has ", file_bytes, " bytes)"));
  }
  return length;
}

absl::StatusOr<std::vector<TensorInfo>> ParseSafetensorsHeader(absl::Span<const uint8_t> bytes,
                                                               uint64_t file_bytes) {
  const absl::StatusOr<uint64_t> length = SafetensorsHeaderBytes(bytes, file_bytes);
  if (!length.ok()) return length.status();
  if (*length > bytes.size() - 8) {
    return Invalid(absl::StrCat("header: found ", bytes.size() - 8, " bytes, expected ", *length));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8, *length);
  // The JSON library takes a NUL for the end of the text and skips a byte order mark.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return Invalid(absl::StrCat("header: found a NUL byte at ", nul, ", expected JSON text"));
  }
  const size_t start = text.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos || text[start] != '{') {
    return Invalid("header: found no opening brace, expected one JSON object");
  }
  HeaderHandler handler;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &handler)) return Invalid(handler.error);
  const absl::Status unique = CheckNamesUnique(handler.tensors);
  if (!unique.ok()) return unique;
  return PlaceTensors(std::move(handler), 8 + *length, file_bytes);
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::filesystem::path& path) {
  absl::StatusOr<ReadOnlyFile> file = ReadOnlyFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::StatusOr<FileIdentity> identity = file->Identity();
  if (!identity.ok()) return identity.status();

  std::vector<uint8_t> bytes(std::min<uint64_t>(8, identity->bytes));
  absl::Status read = file->ReadAt(0, absl::MakeSpan(bytes));
  if (!read.ok()) return read;
  const absl::StatusOr<uint64_t> length = SafetensorsHeaderBytes(bytes, identity->bytes);
  if (!length.ok()) return length.status();
  bytes.resize(8 + *length);
  read = file->ReadAt(8, absl::MakeSpan(bytes).subspan(8));
  if (!read.ok()) return read;

  absl::StatusOr<std::vector<TensorInfo>> tensors = ParseSafetensorsHeader(bytes, identity->bytes);
  if (!tensors.ok()) return tensors.status();
  return SafetensorsHeader{.tensors = *std::move(tensors), .identity = *identity};
}

}  // namespace expertd
