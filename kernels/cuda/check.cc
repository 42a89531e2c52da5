#include "kernels/cuda/check.h"

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
      return absl::StatusCode::kNotFound;
    default:
      return absl::StatusCode::kInternal;
  }
}

// __FILE__ is a path of the build machine; the part from the folder of this file on says as much.
std::string_view ShortPath(std::string_view file) {
  const size_t start = file.rfind("kernels/");
  return start == std::string_view::npos ? file : file.substr(start);
}

}  // namespace

bool IsSticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

absl::Status CudaStatus(cudaError_t error, const char* expression, const char* file, int line) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // an error that is not sticky must not show up in a later call
  const std::string_view path = ShortPath(file);
  absl::Status status(
      CodeOf(error),
      absl::StrCat(absl::string_view(path.data(), path.size()), ":", line, ": ", expression, ": ",
                   cudaGetErrorName(error), " (", cudaGetErrorString(error), ")"));
  return IsSticky(error) ? MarkFatal(std::move(status)) : status;
}

}  // namespace expertd::cuda
