// Who is at the other end of a ring, and whether that process still lives.
#pragma once

#include "ring/words.hpp"

namespace ringmem::ring {

// This process, as it signs its index line.
struct ProcessId {
  u32 pid = 0;
  u32 pid_namespace = 0;  // inode number, low 32 bits; 0: unknown
  u64 started = 0;        // clock ticks since the system's start; 0: unknown
};

ProcessId this_process() noexcept;

// False if that process has certainly ended (a zombie has), also where another one has its number
// now. A device (pid 0), or a process of another pid namespace, of which nothing can be known, counts
// as alive.
bool is_alive(ProcessId process) noexcept;

template <class IndexLine>
ProcessId signature(const IndexLine& line) noexcept {
  const u64 started = load(line.started);
  const ProcessId process{load(line.pid), load(line.pid_namespace), started};
  // Signed anew meanwhile: then one's number may stand beside the other's time.
  return load(line.started) == started ? process : ProcessId{process.pid, process.pid_namespace, 0};
}

template <class IndexLine>
void sign(IndexLine& line, ProcessId process) noexcept {
  store(line.started, u64{0});
  store(line.pid_namespace, process.pid_namespace);
  store(line.pid, process.pid);
  store(line.started, process.started);
}

}  // namespace ringmem::ring
