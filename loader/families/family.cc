#include "loader/families/family.h"

namespace expertd {

absl::Span<const Family* const> ServedFamilies() {
  static const std::array<const Family*, 3> families = {&DeepSeekV4Family(), &ModeloptFamily(),
                                                        &MiniMaxFamily()};
  return families;
}

absl::Span<const RefusedFamily* const> RefusedFamilies() {
  static const std::array<const RefusedFamily*, 2> families = {&CompressedTensorsFamily(),
                                                               &GptOssFamily()};
  return families;
}

}  // namespace expertd
