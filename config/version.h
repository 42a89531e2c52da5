#pragma once

#include <string_view>

namespace expertd {

std::string_view Version();  // "0.1.0", from CMakeLists.txt
std::string_view
Commit();  // twelve digits, "-dirty" after them if files differ; "unknown" outside git

}  // namespace expertd
