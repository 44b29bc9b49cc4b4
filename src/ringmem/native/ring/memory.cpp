#include "ring/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "driver/status.hpp"

namespace ringmem::ring {
namespace {

[[noreturn]] void fail(const char* call, int fd) {
  const int error = errno;
  if (fd >= 0) ::close(fd);
  const Status status = error == ENOMEM || error == ENOSPC || error == EMFILE || error == ENFILE
                            ? Status::out_of_memory
                            : Status::operating_system;
  throw DriverError(status, call, std::strerror(error));
}

void* map_shared(int fd, std::size_t nbytes) noexcept {
  return ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

}  // namespace

SharedMemory SharedMemory::create(std::size_t nbytes) {
  const int fd = ::memfd_create("ringmem-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create", fd);
  if (::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) fail("ftruncate", fd);
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail("fcntl(F_ADD_SEALS)", fd);
  }
  void* data = map_shared(fd, nbytes);
  if (data == MAP_FAILED) fail("mmap", fd);
  return {data, nbytes, fd};
}

SharedMemory SharedMemory::map(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    throw InvalidValue("fd=" + std::to_string(fd) + " is no open file descriptor");
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw InvalidValue("fd=" + std::to_string(fd) +
                       " may be shrunk by its other users; share Ring.fd, which is sealed");
  }
  if (info.st_size == 0) throw InvalidValue("fd=" + std::to_string(fd) + " is empty");
  const auto nbytes = static_cast<std::size_t>(info.st_size);
  void* data = map_shared(fd, nbytes);
  if (data == MAP_FAILED) fail("mmap", -1);
  return {data, nbytes, -1};
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, nbytes_);
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace ringmem::ring
