// How many mappings a process may hold, counted so that a clear error comes before the limit is
// hit. On CPU devices every mapping is one of the kernel's memory areas, bounded by
// vm.max_map_count (65,530 by default); at that bound even an unmap that splits an area fails, so
// the last ones are never handed out. For CUDA no bound is known; set_mapping_limit() sets one.
#pragma once

#include <cstddef>

#include "driver/driver.hpp"

namespace ringmem::mapping {

// Mappings made through this floor that are live in the process, of both platforms.
std::size_t live_mappings() noexcept;

// The bound for mappings of `driver`, 0 where there is none.
std::size_t mapping_limit(const Driver& driver);

// Replaces the bound that mapping_limit() finds; 0 goes back to that. For tests and for drivers
// whose bound is known to the user.
void set_mapping_limit(std::size_t limit) noexcept;

// `count` mappings about to be made. Gives them back when it goes, unless kept.
class MappingTicket {
 public:
  // Throws DriverError (out of memory) when the process would come too near to its bound.
  MappingTicket(const Driver& driver, std::size_t count);
  ~MappingTicket();
  MappingTicket(const MappingTicket&) = delete;
  MappingTicket& operator=(const MappingTicket&) = delete;

  void keep() noexcept { count_ = 0; }

 private:
  std::size_t count_;
};

// `count` kept mappings are gone.
void return_mappings(std::size_t count) noexcept;

}  // namespace ringmem::mapping
