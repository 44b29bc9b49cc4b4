// Work of streams that were closed: no handle names it any more.
#pragma once

#include <vector>

#include "bind/objects.hpp"
#include "memory/reaper.hpp"

namespace ringmem::bind {

// A stream that used the memory. `object` is null for a default stream; `handle` is valid where that
// is open.
struct LastUse {
  const NativeDevice* device;
  StreamHandle handle;
  NativeStream* object;
};

// Has the reaper run the job once all that the streams were given is done. A closed stream left an
// event; where it could not, its device is waited for. Throws DriverError while an open stream
// captures, std::bad_alloc or std::system_error; then nothing happened.
void release_after(const std::vector<LastUse>& uses, ReaperJob&& job);

// For the reaper, which repeats what a capture forbids: frees in the order of a stream that may be
// closed by the time it is its turn.
Status deallocate_later(Allocator& allocator, const Block& block, const LastUse& last) noexcept;

}  // namespace ringmem::bind
