#include "driver/host/memfd.hpp"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "driver/host/process.hpp"

namespace ringmem::host {
namespace {

constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

constexpr const char* magic_of(SharedKind kind) noexcept {
  return kind == SharedKind::physical ? "ringmem-memory1" : "ringmem-pool-v1";
}
static_assert(sizeof "ringmem-memory1" == sizeof Trailer::magic);
static_assert(sizeof "ringmem-pool-v1" == sizeof Trailer::magic);

Status creation_failure() noexcept {
  const bool exhausted = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EFBIG;
  return exhausted ? Status::out_of_memory : Status::operating_system;
}

}  // namespace

Memfd& Memfd::operator=(Memfd&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(owner_, other.owner_);
  return *this;
}

Memfd::~Memfd() {
  if (fd_ >= 0) close(fd_);
}

Status Memfd::create(const char* name, std::uint64_t nbytes, Memfd* file) noexcept {
  Memfd made;
  made.owner_ = getpid();
  made.fd_ = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made.fd_ < 0) return creation_failure();
  if (ftruncate(made.fd_, static_cast<off_t>(nbytes)) != 0) return creation_failure();
  *file = std::move(made);
  return Status::success;
}

Status Memfd::create_shared(SharedKind kind, Location location, std::uint64_t nbytes,
                            Memfd* file) noexcept {
  Memfd made;
  const Status status = create(magic_of(kind), nbytes + page_bytes, &made);
  if (!ok(status)) return status;
  Trailer trailer{};
  std::memcpy(trailer.magic, magic_of(kind), sizeof trailer.magic);
  trailer.location_kind = static_cast<std::int32_t>(location.kind);
  trailer.location_id = location.id;
  trailer.nbytes = nbytes;
  const auto at = static_cast<off_t>(nbytes);
  if (pwrite(made.fd_, &trailer, sizeof trailer, at) != static_cast<ssize_t>(sizeof trailer) ||
      fcntl(made.fd_, F_ADD_SEALS, seals) != 0) {
    return Status::operating_system;
  }
  *file = std::move(made);
  return Status::success;
}

Status Memfd::open_shared(SharedKind kind, int fd, Trailer* trailer, Memfd* file) noexcept {
  struct stat about {};
  if (fstat(fd, &about) != 0 || fcntl(fd, F_GET_SEALS) != seals) return Status::invalid_value;
  const auto size = static_cast<std::uint64_t>(about.st_size);
  if (size < 2 * page_bytes || size % page_bytes != 0) return Status::invalid_value;
  Trailer found{};
  const auto at = static_cast<off_t>(size - page_bytes);
  if (pread(fd, &found, sizeof found, at) != static_cast<ssize_t>(sizeof found) ||
      std::memcmp(found.magic, magic_of(kind), sizeof found.magic) != 0 ||
      found.nbytes != size - page_bytes) {
    return Status::invalid_value;
  }
  Memfd opened;
  opened.owner_ = getpid();
  opened.fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (opened.fd_ < 0) return creation_failure();
  *trailer = found;
  *file = std::move(opened);
  return Status::success;
}

int Memfd::duplicate() const noexcept { return fcntl(fd_, F_DUPFD_CLOEXEC, 3); }

std::pair<dev_t, ino_t> Memfd::identity() const noexcept {
  struct stat about {};
  if (fstat(fd_, &about) != 0) return {};
  return {about.st_dev, about.st_ino};
}

void Memfd::punch(std::uint64_t offset, std::uint64_t nbytes) const noexcept {
  if (nbytes == 0 || fd_ < 0 || getpid() != owner_) return;
  // Failure leaves pages behind that the next tenant overwrites: nothing to do about it.
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(nbytes));
}

bool Memfd::next_data(std::uint64_t* offset, std::uint64_t end,
                      std::uint64_t* nbytes) const noexcept {
  const off_t data = lseek(fd_, static_cast<off_t>(*offset), SEEK_DATA);
  if (data < 0 || static_cast<std::uint64_t>(data) >= end) return false;
  const off_t hole = lseek(fd_, data, SEEK_HOLE);
  const std::uint64_t stop = hole < 0 ? end : std::min(end, static_cast<std::uint64_t>(hole));
  *offset = static_cast<std::uint64_t>(data);
  *nbytes = stop - *offset;
  return *nbytes > 0;
}

}  // namespace ringmem::host
