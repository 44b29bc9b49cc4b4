#include "ring/process.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace ringmem::ring {

ProcessId this_process() noexcept {
  struct stat info {};
  const bool known = ::stat("/proc/self/ns/pid", &info) == 0;
  return {static_cast<u32>(::getpid()), known ? static_cast<u32>(info.st_ino) : 0};
}

bool is_alive(ProcessId process) noexcept {
  if (process.pid == 0) return true;
  const ProcessId self = this_process();
  if (process.pid_namespace != self.pid_namespace) return true;
  if (process.pid == self.pid) return true;
  // A negative number would ask about a process group: a damaged line names nobody who lives.
  if (static_cast<pid_t>(process.pid) <= 0) return false;
  if (::kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH) return false;
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%u/stat", process.pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno != ENOENT;
  char text[128] = {};
  [[maybe_unused]] const auto nbytes = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  const char* name_end = std::strrchr(text, ')');  // "pid (name) state …"
  if (name_end == nullptr || std::strlen(name_end) < 3) return true;
  return name_end[2] != 'Z' && name_end[2] != 'X';
}

}  // namespace ringmem::ring
