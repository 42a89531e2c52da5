#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/reference/reference.h"
#include "loader/checkpoint.h"

namespace expertd {

// One expert's matrices as they lie in the files.
class FileExpert {
 public:
  // Opens, reads and closes the files. DATA_LOSS if a range cannot be read.
  static absl::StatusOr<FileExpert> Read(const Checkpoint& checkpoint, const LayerSpec& layer,
                                         int32_t expert);

  reference::ExpertView View() const;  // valid as long as this

 private:
  struct Data {
    std::vector<uint8_t> codes;
    std::vector<uint8_t> scales;
    double second_level = 1;
  };
  Data matrices_[kNumMatrices];
};

}  // namespace expertd
