#pragma once

#include <sys/types.h>

#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

// Tests that need several processes start the test program itself again, with a hidden argument
// that names a role. A child has called nothing of CUDA or NCCL yet, has its own environment, and
// is killed when its object goes.
namespace expertd::testing {

// Returns the child's exit status; what it prints is collected.
using ChildRole = int (*)(const std::vector<std::string>& arguments);

// At namespace scope: const RegisterChildRole kX("name", Role);
struct RegisterChildRole {
  RegisterChildRole(const std::string& name, ChildRole role);
};

// Of main: the exit status of the role if the arguments name one.
std::optional<int> RunChildRole(int argc, char** argv);

class ChildProcess {
 public:
  // `environment`: variables to set (name, value) beside those of this process.
  ChildProcess(const std::string& role, const std::vector<std::string>& arguments,
               const std::vector<std::pair<std::string, std::string>>& environment = {});
  ~ChildProcess();

  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Exit status, -N if signal N ended it; none if it still runs after `limit`.
  std::optional<int> Wait(absl::Duration limit);
  // Whether it printed `text` within `limit`.
  bool WaitForOutput(const std::string& text, absl::Duration limit) const;
  void Kill();
  std::string Output() const;  // stdout and stderr so far

 private:
  pid_t pid_ = -1;
  std::optional<int> status_;
  std::FILE* output_ = nullptr;
};

}  // namespace expertd::testing
