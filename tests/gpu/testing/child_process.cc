#include "tests/gpu/testing/child_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <map>

#include "absl/time/clock.h"

extern char** environ;

namespace expertd::testing {
namespace {

constexpr char kHiddenArgument[] = "--expertd-child";
constexpr absl::Duration kPollEvery = absl::Milliseconds(5);

std::map<std::string, ChildRole>& Roles() {
  static auto* roles = new std::map<std::string, ChildRole>;
  return *roles;
}

std::vector<std::string> WithEnvironment(
    const std::vector<std::pair<std::string, std::string>>& changes) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : changes) variables[name] = value;
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  return entries;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

RegisterChildRole::RegisterChildRole(const std::string& name, ChildRole role) {
  Roles()[name] = role;
}

std::optional<int> RunChildRole(int argc, char** argv) {
  if (argc < 3 || std::string(argv[1]) != kHiddenArgument) return std::nullopt;
  const auto role = Roles().find(argv[2]);
  if (role == Roles().end()) {
    std::fprintf(stderr, "no child role named %s\n", argv[2]);
    return 2;
  }
  return role->second(std::vector<std::string>(argv + 3, argv + argc));
}

ChildProcess::ChildProcess(const std::string& role, const std::vector<std::string>& arguments,
                           const std::vector<std::pair<std::string, std::string>>& environment)
    : output_(std::tmpfile()) {
  std::vector<std::string> words = {"/proc/self/exe", kHiddenArgument, role};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variables = WithEnvironment(environment);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fileno(output_), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, fileno(output_), STDERR_FILENO);
  if (posix_spawn(&pid_, words[0].c_str(), &actions, nullptr, Pointers(words).data(),
                  Pointers(variables).data()) != 0) {
    pid_ = -1;
    status_ = 127;
  }
  posix_spawn_file_actions_destroy(&actions);
}

ChildProcess::~ChildProcess() {
  Kill();
  std::fclose(output_);
}

std::optional<int> ChildProcess::Wait(absl::Duration limit) {
  const absl::Time deadline = absl::Now() + limit;
  while (!status_.has_value()) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    } else if (absl::Now() >= deadline) {
      return std::nullopt;
    } else {
      absl::SleepFor(kPollEvery);
    }
  }
  return status_;
}

bool ChildProcess::WaitForOutput(const std::string& text, absl::Duration limit) const {
  const absl::Time deadline = absl::Now() + limit;
  while (Output().find(text) == std::string::npos) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(kPollEvery);
  }
  return true;
}

// A process inside the driver may not go at once; init reaps it then.
void ChildProcess::Kill() {
  if (status_.has_value()) return;
  kill(pid_, SIGKILL);
  (void)Wait(absl::Seconds(5));
}

std::string ChildProcess::Output() const {
  std::string text;
  char buffer[4096];
  ssize_t bytes = 0;
  while ((bytes = pread(fileno(output_), buffer, sizeof(buffer), static_cast<off_t>(text.size()))) >
         0) {
    text.append(buffer, static_cast<size_t>(bytes));
  }
  return text;
}

}  // namespace expertd::testing
