#include "kernels/cuda/nccl_comm/device_probe.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"

namespace expertd::cuda {
namespace {

constexpr int kBusIdBytes = 16;  // domain:bus:device.function and its end

// NVML by hand: its header is no part of the toolkit that is needed to build.
class Nvml {
 public:
  Nvml() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    using Init = int (*)();
    const auto init = Find<Init>("nvmlInit_v2");
    device_ = Find<DeviceByBusId>("nvmlDeviceGetHandleByPciBusId_v2");
    status_ = Find<P2pStatus>("nvmlDeviceGetP2PStatus");
    usable_ = init != nullptr && device_ != nullptr && status_ != nullptr && init() == 0;
  }
  // The process keeps the library: NCCL uses it too.
  ~Nvml() = default;
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // Empty if both directions are open, or if it cannot tell.
  std::string WhyNot(const std::string& from, const std::string& to) const {
    static constexpr const char* kDirections[] = {"reads", "writes"};  // indices of nvml.h
    void* devices[2] = {nullptr, nullptr};
    if (!usable_ || device_(from.c_str(), &devices[0]) != 0 ||
        device_(to.c_str(), &devices[1]) != 0) {
      return "";
    }
    for (int direction = 0; direction < 2; ++direction) {
      int status = 0;
      if (status_(devices[0], devices[1], direction, &status) == 0 && status != 0) {
        return absl::StrCat("NVML says that peer ", kDirections[direction],
                            " are not possible: ", StatusText(status));
      }
    }
    return "";
  }

 private:
  using DeviceByBusId = int (*)(const char*, void**);
  using P2pStatus = int (*)(void*, void*, int, int*);

  // The values of nvmlGpuP2PStatus_t.
  static const char* StatusText(int status) {
    static constexpr const char* kTexts[] = {"ok",
                                             "the chipset does not support it",
                                             "the GPU does not support it",
                                             "the I/O hub does not support it",
                                             "disabled by a registry key",
                                             "not supported"};
    return status >= 0 && status < 6 ? kTexts[status] : "unknown reason";
  }

  template <typename Function>
  Function Find(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_ = nullptr;
  DeviceByBusId device_ = nullptr;
  P2pStatus status_ = nullptr;
  bool usable_ = false;
};

bool IsSetToZero(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "0") == 0;
}

// What NCCL hashes to tell hosts apart.
std::string HostIdentity() {
  if (const char* set = std::getenv("NCCL_HOSTID")) return set;
  char name[64] = {};
  (void)gethostname(name, sizeof(name) - 1);
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  return absl::StrCat(name, "/", boot_id);
}

// Through the runtime's table: libcuda itself is not linked.
absl::StatusOr<int> DriverAttribute(CUdevice_attribute attribute, int device) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDriverEntryPointByVersion("cuDeviceGetAttribute", &function,
                                                                12000, cudaEnableDefault, &found));
  using GetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);
  int value = 0;
  if (function == nullptr ||
      reinterpret_cast<GetAttribute>(function)(&value, attribute, device) != CUDA_SUCCESS) {
    return 0;
  }
  return value;
}

std::string BusId(const RankFacts& facts) {
  return std::string(facts.device, strnlen(facts.device, kBusIdBytes - 1)).substr(0, 12);
}

}  // namespace

absl::StatusOr<RankFacts> ProbeThisRank() {
  RankFacts facts = {};
  int device = 0;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  char bus_id[kBusIdBytes] = {};
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device));
  cudaDeviceProp properties;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, device));
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaDriverGetVersion(&facts.driver));
  auto vmm = DriverAttribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
  if (!vmm.ok()) return vmm.status();
  facts.vmm = *vmm;
  facts.vmm_off = IsSetToZero("NCCL_CUMEM_ENABLE") ? 1 : 0;
  facts.windows_off = IsSetToZero("NCCL_WIN_ENABLE") ? 1 : 0;
  CopyText(facts.host, HostIdentity());
  CopyText(facts.device, absl::StrCat(bus_id, " ", properties.name));
  return facts;
}

std::string WhyNoPeerAccess(const RankFacts& self, const RankFacts& peer) {
  static const Nvml* nvml = new Nvml;
  int device = 0;
  int peer_device = 0;
  int can_access = 1;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetByPCIBusId(&peer_device, BusId(peer).c_str()) == cudaSuccess &&
      cudaDeviceCanAccessPeer(&can_access, device, peer_device) == cudaSuccess && can_access == 0) {
    return "CUDA says that peer access is not possible";
  }
  (void)cudaGetLastError();  // a hidden device is no error
  return nvml->WhyNot(BusId(self), BusId(peer));
}

}  // namespace expertd::cuda
