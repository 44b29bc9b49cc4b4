// What `with stream:` and `with device.use(…):` pushed on this thread. Looking is a few loads; the
// state itself belongs to Python's dictionary of the thread, so that a thread that ends inside such
// a block gives back what it held while there is still a GIL to do it under.
#pragma once

#include <memory>
#include <vector>

#include "bind/objects.hpp"

namespace ringmem::bind {

// Innermost last. Devices are only compared, never followed.
struct ThreadState {
  struct CurrentStream {
    NativeStream* stream;
    nb::object object;
  };
  struct CurrentAllocator {
    const NativeDevice* device;
    std::shared_ptr<Allocator> allocator;
  };

  std::vector<CurrentStream> streams;
  std::vector<CurrentAllocator> allocators;
};

// The thread's state, or null where nothing was pushed yet.
inline thread_local ThreadState* thread_state = nullptr;

// The same, made if need be. The GIL must be held.
ThreadState& make_thread_state();

}  // namespace ringmem::bind
