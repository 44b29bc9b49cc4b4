#include "mapping/physical.hpp"

#include "mapping/arithmetic.hpp"
#include "mapping/guard.hpp"

namespace ringmem::mapping {
namespace {

bool has(Driver& driver, int device, Attribute attribute) {
  int value = 0;
  check(driver.attribute(device, attribute, &value), "cuDeviceGetAttribute");
  return value != 0;
}

void require(bool capable, const char* operation, const char* why) {
  if (!capable) throw DriverError(Status::not_supported, operation, why);
}

// "for 4194304 bytes; 1048576 of 8388608 are free"
std::string describe_request(Driver& driver, std::size_t nbytes, const PhysicalProps& props) {
  std::string text = "for " + std::to_string(nbytes) + " bytes";
  MemoryInfo info;
  if (props.location.kind == LocationKind::device &&
      ok(driver.memory_info(props.location.id, &info))) {
    text += "; " + std::to_string(info.free) + " of " + std::to_string(info.total) + " are free";
  }
  return text;
}

}  // namespace

std::size_t granularity_of(Driver& driver, const PhysicalProps& props, bool recommended) {
  std::size_t nbytes = 0;
  check(driver.granularity(props, recommended, &nbytes), "cuMemGetAllocationGranularity");
  return nbytes;
}

void require_capable(Driver& driver, const PhysicalProps& props) {
  // Host memory is judged by device 0: a driver either has host nodes as locations or it has not.
  const int device = props.location.kind == LocationKind::device ? props.location.id : 0;
  require(has(driver, device, Attribute::virtual_memory_management), "cuMemCreate",
          "the device has no virtual memory management; use plain buffers or a pool");
  require(!props.shareable || has(driver, device, Attribute::handle_type_posix_fd), "cuMemCreate",
          "the device cannot export memory as file descriptors; use shareable=False");
  require(!props.rdma || has(driver, device, Attribute::gpu_direct_rdma_with_vmm), "cuMemCreate",
          "the device has no GPUDirect RDMA for virtual memory; use rdma=False");
  require(props.location.kind == LocationKind::device ||
              has(driver, device, Attribute::host_numa_virtual_memory_management),
          "cuMemCreate", "the device cannot map memory of a host NUMA node");
}

std::shared_ptr<PhysicalMemory> PhysicalMemory::create(DriverRef driver, std::size_t nbytes,
                                                       const PhysicalProps& props) {
  require_positive(nbytes, "nbytes");
  require_capable(*driver, props);
  const std::size_t size = round_up(nbytes, granularity_of(*driver, props), "nbytes");
  return create_pages(std::move(driver), size, props);
}

std::shared_ptr<PhysicalMemory> PhysicalMemory::create_pages(DriverRef driver, std::size_t nbytes,
                                                             const PhysicalProps& props) {
  auto memory = std::make_shared<PhysicalMemory>(driver, 0, nbytes, props);
  const Status status = driver->mem_create(nbytes, props, &memory->handle_);
  if (!ok(status)) [[unlikely]] {
    throw DriverError(status, "cuMemCreate", describe_request(*driver, nbytes, props));
  }
  return memory;
}

std::shared_ptr<PhysicalMemory> PhysicalMemory::import_fd(DriverRef driver, int fd,
                                                          std::size_t nbytes,
                                                          const PhysicalProps& props) {
  require_positive(nbytes, "nbytes");
  require_multiple(nbytes, granularity_of(*driver, props), "nbytes");
  if (fd < 0) {
    throw InvalidValue("fd is " + std::to_string(fd) + ", not a descriptor: pass what export_fd() "
                       "gave, or a copy of it that came over a Unix socket");
  }
  auto memory = std::make_shared<PhysicalMemory>(driver, 0, nbytes, props);
  memory->imported_ = true;
  check(driver->mem_import(fd, &memory->handle_), "cuMemImportFromShareableHandle");
  return memory;
}

PhysicalMemory::~PhysicalMemory() {
  if (handle_ == 0 || process_.inherited()) return;
  insist([this] { return driver_->mem_release(handle_); });
}

int PhysicalMemory::export_fd() {
  process_.require_own("cuMemExportToShareableHandle");
  const PhysicalHandle live = enter();  // so that a concurrent close() cannot release it meanwhile
  int fd = -1;
  const Status status =
      props_.shareable ? driver_->mem_export(live, &fd) : Status::not_supported;
  if (ok(status)) exported_.store(true, std::memory_order_relaxed);
  leave();
  check(status, "cuMemExportToShareableHandle",
        props_.shareable ? "" : "the memory was created with shareable=False");
  return fd;
}

void PhysicalMemory::close() {
  if (process_.inherited()) return;
  std::lock_guard lock(mutex_);
  closed_.store(true, std::memory_order_relaxed);
  if (mappings_ == 0) check(release_locked(), "cuMemRelease");
}

PhysicalHandle PhysicalMemory::enter() {
  process_.require_own("cuMemMap");
  std::lock_guard lock(mutex_);
  if (closed()) throw Closed("the physical memory is closed");
  ++mappings_;
  return handle_;
}

Status PhysicalMemory::leave() noexcept {
  std::lock_guard lock(mutex_);
  --mappings_;
  return closed() && mappings_ == 0 ? release_locked() : Status::success;
}

PhysicalHandle PhysicalMemory::handle() const {
  std::lock_guard lock(mutex_);
  if (handle_ == 0 || closed()) throw Closed("the physical memory is closed");
  return handle_;
}

std::size_t PhysicalMemory::mappings() const noexcept {
  std::lock_guard lock(mutex_);
  return mappings_;
}

// A failed release keeps the handle: the destructor, or another close(), tries again.
Status PhysicalMemory::release_locked() noexcept {
  if (handle_ == 0) return Status::success;
  Status status = driver_->mem_release(handle_);
  if (release_failed_ && gone(status)) status = Status::success;
  release_failed_ = !ok(status);
  if (ok(status)) handle_ = 0;
  return status;
}

}  // namespace ringmem::mapping
