// Address ranges, physical memory and mappings: cuMemAddressReserve, cuMemCreate, cuMemMap and what
// belongs to them. Physical memory is a place in a sparse file; mapping it costs the kernel one
// call when access is first given.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "driver/host/heap.hpp"
#include "driver/host/page_table.hpp"
#include "driver/types.hpp"

namespace ringmem::host {

class Machine;

// The file that non-shareable physical memory of one location lies in. Its offsets never run out.
struct PhysicalSpace {
  Memfd file;
  std::mutex mutex;
  Extents extents{0, std::uint64_t{1} << 50};
};

// One physical allocation. Goes when no handle and no mapping holds it.
struct Physical {
  ~Physical();

  Location location;
  std::uint64_t nbytes = 0;
  bool shareable = false;
  Budget* budget = nullptr;                // charged with nbytes
  std::shared_ptr<PhysicalSpace> space;    // null when it has a file of its own
  std::uint64_t offset = 0;
  Memfd own;

  int fd() const noexcept { return space ? space->file.fd() : own.fd(); }
};

class VirtualMemory {
 public:
  explicit VirtualMemory(Machine& machine) : machine_(machine) {}
  ~VirtualMemory();

  Status reserve(std::uint64_t nbytes, std::uint64_t alignment, std::uint64_t hint,
                 std::uint64_t* ptr);
  Status free(std::uint64_t ptr, std::uint64_t nbytes);
  Status check_props(const PhysicalProps& props) const;
  Status create(std::uint64_t nbytes, const PhysicalProps& props, PhysicalHandle* handle);
  Status release(PhysicalHandle handle);
  Status map(std::uint64_t ptr, std::uint64_t nbytes, PhysicalHandle handle);
  Status unmap(std::uint64_t ptr, std::uint64_t nbytes);
  Status set_access(std::uint64_t ptr, std::uint64_t nbytes, const AccessGrant* grants,
                    std::size_t count);
  Status get_access(std::uint64_t ptr, Location location, Access* access);
  Status export_fd(PhysicalHandle handle, int* fd);
  Status import_fd(int fd, PhysicalHandle* handle);
  Status retain(std::uint64_t ptr, PhysicalHandle* handle);

 private:
  // A handle keeps its number while it has references or mappings.
  struct Entry {
    std::shared_ptr<Physical> physical;
    std::uint64_t references = 0;
    std::uint64_t mappings = 0;
  };
  struct Mapping {
    RegionRef region;
    std::shared_ptr<Physical> physical;
    PhysicalHandle handle = 0;
    bool installed = false;  // the kernel knows it
    int protection = 0;      // PROT_*
  };
  using Mappings = std::map<std::uint64_t, Mapping>;  // by base
  struct Change;

  Entry* live(PhysicalHandle handle);
  std::weak_ptr<Physical>& shared_slot(const Memfd& file);
  PhysicalHandle add_entry(std::shared_ptr<Physical> physical);
  bool whole_mappings(std::uint64_t ptr, std::uint64_t nbytes, Mappings::iterator* first,
                      Mappings::iterator* last);
  const std::pair<const std::uint64_t, std::uint64_t>* reservation_of(std::uint64_t ptr,
                                                                      std::uint64_t nbytes) const;
  std::size_t gaps_beside(std::uint64_t ptr, std::uint64_t nbytes) const;
  Status space_of(Location location, std::shared_ptr<PhysicalSpace>* space);
  Status allocate(std::uint64_t nbytes, const PhysicalProps& props,
                  std::shared_ptr<Physical>* physical);
  Status check_grants(const Mapping& mapping, const AccessGrant* grants, std::size_t count) const;
  Status install(std::vector<Change>& changes);

  Machine& machine_;
  std::mutex mutex_;  // guards what follows; physical memory is given back with it released
  std::map<std::uint64_t, std::uint64_t> reservations_;  // begin → nbytes
  Mappings mappings_;
  std::unordered_map<PhysicalHandle, Entry> handles_;
  std::map<int, std::shared_ptr<PhysicalSpace>> spaces_;  // by device; -1: the host
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Physical>> shared_;  // by file
  std::size_t shared_purge_ = 64;  // size of `shared_` at which the dead are weeded out
};

}  // namespace ringmem::host
