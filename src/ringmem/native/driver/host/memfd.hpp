// A sparse file in memory. Its pages come when they are touched and go when a hole is punched;
// reading a hole through a mapping makes pages too.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <utility>

#include "driver/status.hpp"
#include "driver/types.hpp"

namespace ringmem::host {

// What the last page of a file that may leave the process says about it.
struct Trailer {
  char magic[16];
  std::int32_t location_kind;
  std::int32_t location_id;
  std::uint64_t nbytes;  // without the trailer's page
};

enum class SharedKind { physical, pool };

class Memfd {
 public:
  Memfd() = default;
  Memfd(Memfd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), owner_(other.owner_) {}
  Memfd& operator=(Memfd&& other) noexcept;
  ~Memfd();

  // A file of `nbytes`, all holes.
  static Status create(const char* name, std::uint64_t nbytes, Memfd* file) noexcept;
  // The same with a trailer, sealed against any change of size.
  static Status create_shared(SharedKind kind, Location location, std::uint64_t nbytes,
                              Memfd* file) noexcept;
  // Looks at a descriptor from elsewhere: invalid_value unless create_shared made it.
  static Status open_shared(SharedKind kind, int fd, Trailer* trailer, Memfd* file) noexcept;

  // A descriptor for the caller, closed on exec; -1 when there is none to be had.
  int duplicate() const noexcept;
  int fd() const noexcept { return fd_; }
  // Device and number of the file: the same for every descriptor of it.
  std::pair<dev_t, ino_t> identity() const noexcept;

  // Gives the pages back. Does nothing in a child: the parent's memory would be zeroed.
  void punch(std::uint64_t offset, std::uint64_t nbytes) const noexcept;
  // The first range with pages in [*offset, end): false when there is none.
  bool next_data(std::uint64_t* offset, std::uint64_t end, std::uint64_t* nbytes) const noexcept;

 private:
  int fd_ = -1;
  pid_t owner_ = 0;
};

}  // namespace ringmem::host
