#include "ring/process.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ringmem::ring {
namespace {

struct Look {
  bool found = false;  // false: there is no such process
  char state = '?';
  u64 started = 0;
};

// /proc/<pid>/stat: "pid (name) state …", the time of the start is field 22.
Look look_at(u32 pid) noexcept {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {.found = errno != ENOENT || ::access("/proc/self/stat", F_OK) != 0};
  char text[1024] = {};
  [[maybe_unused]] const auto nbytes = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  const char* field = std::strrchr(text, ')');
  if (field == nullptr || std::strlen(field) < 3) return {.found = true};
  Look look{.found = true, .state = field[2]};
  for (int number = 2; number < 22 && field != nullptr; ++number) field = std::strchr(field + 1, ' ');
  if (field != nullptr) look.started = std::strtoull(field, nullptr, 10);
  return look;
}

u32 inode(const char* path) noexcept {
  struct stat info {};
  return ::stat(path, &info) == 0 ? static_cast<u32>(info.st_ino) : 0;
}

// In a time namespace of its own a process is shown other times than the rest.
bool times_compare() noexcept {
  constexpr u32 first_of_the_system = 0xeffffffa;  // PROC_TIME_INIT_INO of Linux
  const u32 time_namespace = inode("/proc/self/ns/time");
  return time_namespace == 0 || time_namespace == first_of_the_system;
}

}  // namespace

ProcessId this_process() noexcept {
  const auto pid = static_cast<u32>(::getpid());
  return {pid, inode("/proc/self/ns/pid"), times_compare() ? look_at(pid).started : 0};
}

bool is_alive(ProcessId process) noexcept {
  if (process.pid == 0) return true;
  if (process.pid_namespace != inode("/proc/self/ns/pid")) return true;
  // A negative number would ask about a process group: a damaged line names nobody who lives.
  if (static_cast<pid_t>(process.pid) <= 0) return false;
  if (::kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH) return false;
  const Look look = look_at(process.pid);
  if (!look.found || look.state == 'Z' || look.state == 'X') return false;
  return process.started == 0 || look.started == 0 || look.started == process.started ||
         !times_compare();
}

}  // namespace ringmem::ring
