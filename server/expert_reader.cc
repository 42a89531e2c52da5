#include "server/expert_reader.h"

#include <cstring>

#include "loader/file.h"

namespace expertd {
namespace {

absl::Status ReadRange(const Checkpoint& checkpoint, const FileRange& range, uint8_t* into) {
  const absl::StatusOr<ReadOnlyFile> file = ReadOnlyFile::Open(checkpoint.files()[range.file].path);
  if (!file.ok()) return file.status();
  return file->ReadAt(range.offset, absl::MakeSpan(into, range.bytes));
}

}  // namespace

absl::StatusOr<FileExpert> FileExpert::Read(const Checkpoint& checkpoint, const LayerSpec& layer,
                                            int32_t expert) {
  FileExpert result;
  for (int m = 0; m < kNumMatrices; ++m) {
    const MatrixLocation& location = checkpoint.Locate(layer.layer, expert, static_cast<Matrix>(m));
    Data& data = result.matrices_[m];
    data.codes.resize(location.codes.bytes);
    data.scales.resize(location.scales.bytes);
    absl::Status status = ReadRange(checkpoint, location.codes, data.codes.data());
    if (status.ok()) status = ReadRange(checkpoint, location.scales, data.scales.data());
    if (status.ok() && location.second_level.file >= 0) {
      uint8_t bytes[sizeof(float)];
      status = ReadRange(checkpoint, location.second_level, bytes);
      float second_level;
      std::memcpy(&second_level, bytes, sizeof(float));
      data.second_level = second_level;
    }
    if (!status.ok()) return status;
  }
  return result;
}

reference::ExpertView FileExpert::View() const {
  reference::ExpertView view;
  for (int m = 0; m < kNumMatrices; ++m) {
    view.matrices[m] = {matrices_[m].codes, matrices_[m].scales, matrices_[m].second_level};
  }
  return view;
}

}  // namespace expertd
