#include "loader/verify.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/formats.h"
#include "loader/file.h"
#include "loader/scale_check.h"

namespace expertd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Range {
  double low = kInfinity;
  double high = -kInfinity;

  void Add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  // {0, 0} if nothing was added.
  std::pair<double, double> Ends() const {
    return low <= high ? std::pair{low, high} : std::pair{0.0, 0.0};
  }
};

class LayerVerifier {
 public:
  LayerVerifier(const Checkpoint& checkpoint, const LayerSpec& spec, Problems* problems)
      : checkpoint_(checkpoint), spec_(spec), problems_(problems) {
    result_.layer = spec.layer;
  }

  absl::Status Take(int32_t expert, Matrix matrix) {
    const MatrixLocation& location = checkpoint_.Locate(spec_.layer, expert, matrix);
    absl::Status status = Read(location.scales, &scales_);
    if (!status.ok()) return status;
    codes_.clear();
    if (spec_.recipe == Recipe::kMxfp4 && !BlockScalesPlain(spec_.recipe, scales_)) {
      status = Read(location.codes, &codes_);
      if (!status.ok()) return status;
    }
    const bool mxfp4 = spec_.recipe == Recipe::kMxfp4;
    Tell(expert, matrix, mxfp4 ? ExpertPart::kUe8m0Scales : ExpertPart::kE4m3Scales,
         FindBadBlockScale(spec_.recipe, ShapeOf(spec_, matrix), codes_, scales_));
    CountScales();
    if (mxfp4) return absl::OkStatus();

    float value = 0;
    status = ReadFloat(location.second_level, &value);
    if (!status.ok()) return status;
    const auto bad = FindBadSecondLevel(value);
    Tell(expert, matrix, ExpertPart::kSecondLevel, bad);
    if (!bad) second_.Add(value);
    if (location.input_scale.file < 0) return absl::OkStatus();
    status = ReadFloat(location.input_scale, &value);
    input_.Add(value);
    ++result_.input_scales;
    return status;
  }

  LayerScales Finish() {
    const std::array<int64_t, 256>& counts = counts_;
    Range range;
    for (int byte = 0; byte < 256; ++byte) {
      const auto at = static_cast<size_t>(byte);
      if (counts[at] == 0) continue;
      result_.blocks += counts[at];
      const bool in_range = spec_.recipe == Recipe::kNvfp4 ? (byte & 0x7f) != 0
                                                           : byte >= kMinUe8m0 && byte <= kMaxUe8m0;
      if (!in_range) {
        result_.zero_blocks += counts[at];
        continue;
      }
      const auto code = static_cast<uint8_t>(byte);
      range.Add(spec_.recipe == Recipe::kNvfp4 ? DecodeE4m3(code) : DecodeUe8m0(code));
    }
    std::tie(result_.smallest_scale, result_.largest_scale) = range.Ends();
    std::tie(result_.smallest_second, result_.largest_second) = second_.Ends();
    std::tie(result_.smallest_input, result_.largest_input) = input_.Ends();
    return result_;
  }

 private:
  void CountScales() {
    for (const uint8_t scale : scales_) ++counts_[scale];
  }

  void Tell(int32_t expert, Matrix matrix, ExpertPart part, const std::optional<std::string>& bad) {
    if (!bad) return;
    problems_->Add(
        absl::StrCat(checkpoint_.Describe(spec_.layer, expert, matrix, part), ": ", *bad));
  }

  // Files are opened once in a row of reads.
  absl::Status Read(const FileRange& range, std::vector<uint8_t>* into) {
    if (!file_ || file_number_ != range.file) {
      file_.reset();
      absl::StatusOr<ReadOnlyFile> opened =
          ReadOnlyFile::Open(checkpoint_.files()[static_cast<size_t>(range.file)].path);
      if (!opened.ok()) return opened.status();
      file_ = *std::move(opened);
      file_number_ = range.file;
    }
    into->resize(range.bytes);
    return file_->ReadAt(range.offset, absl::MakeSpan(*into));
  }

  absl::Status ReadFloat(const FileRange& range, float* value) {
    const absl::Status status = Read(range, &scalar_);
    if (!status.ok()) return status;
    std::array<uint8_t, sizeof(float)> bytes;
    std::copy_n(scalar_.begin(), bytes.size(), bytes.begin());
    *value = std::bit_cast<float>(bytes);
    return absl::OkStatus();
  }

  const Checkpoint& checkpoint_;
  const LayerSpec& spec_;
  Problems* problems_;
  LayerScales result_;
  std::array<int64_t, 256> counts_ = {};  // blocks by scale byte
  Range second_, input_;
  std::vector<uint8_t> scales_, codes_, scalar_;
  std::optional<ReadOnlyFile> file_;
  int32_t file_number_ = -1;
};

}  // namespace

std::vector<LayerScales> VerifyScales(const Checkpoint& checkpoint,
                                      const std::vector<int32_t>& experts, Problems* problems) {
  std::vector<LayerScales> layers;
  for (const LayerSpec& spec : checkpoint.layers()) {
    LayerVerifier verifier(checkpoint, spec, problems);
    for (const int32_t expert : experts) {
      for (int m = 0; m < kNumMatrices; ++m) {
        const absl::Status status = verifier.Take(expert, static_cast<Matrix>(m));
        if (status.ok()) continue;
        problems->Add(std::string(status.message()));
        return layers;  // a file that cannot be read will not get better
      }
    }
    layers.push_back(verifier.Finish());
  }
  return layers;
}

}  // namespace expertd
