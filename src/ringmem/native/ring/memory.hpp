// Host memory for a ring: anonymous shared memory with a file descriptor, which other processes
// can map too.
#pragma once

#include <cstddef>

namespace ringmem::ring {

class SharedMemory {
 public:
  // New zeroed memory. Its size is sealed: no process can shrink it under another's feet.
  static SharedMemory create(std::size_t nbytes);
  // Maps what another process created. The descriptor stays the caller's. Throws InvalidValue for
  // a file whose size is not sealed.
  static SharedMemory map(int fd);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  void* data() const noexcept { return data_; }
  std::size_t nbytes() const noexcept { return nbytes_; }
  int fd() const noexcept { return fd_; }  // -1 where it was mapped from another's

 private:
  SharedMemory(void* data, std::size_t nbytes, int fd) : data_(data), nbytes_(nbytes), fd_(fd) {}

  void* data_ = nullptr;
  std::size_t nbytes_ = 0;
  int fd_ = -1;
};

}  // namespace ringmem::ring
