// The extension module: one call for each room.
#include "bind/objects.hpp"

NB_MODULE(_native, m) {
  using namespace ringmem::bind;
  m.doc() = "The native floor of ringmem. Not an API: use the package.";
  bind_errors(m);
  bind_allocation(m);
  bind_driver(m);
  bind_device(m);
  bind_stream(m);
  bind_layout(m);
  bind_ring(m);
  bind_buffer(m);
}
