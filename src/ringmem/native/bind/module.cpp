// The extension module: one call for each room.
#include "bind/objects.hpp"

NB_MODULE(_native, m) {
  using namespace ringmem::bind;
  // Enumerations and default arguments live as long as the interpreter; that is no leak to report.
  nb::set_leak_warnings(false);
  m.doc() = "The native floor of ringmem. Not an API: use the package.";
  bind_errors(m);
  bind_allocation(m);
  bind_driver(m);
  bind_device(m);
  bind_stream(m);
  bind_event(m);
  bind_layout(m);
  bind_mapping(m);
  bind_residency(m);
  bind_ring(m);
  bind_ring_kernel(m);
  bind_ring_call(m);
  bind_ring_aio(m);
  bind_ring_bridge(m);
  bind_buffer(m);
  bind_pool(m);
}
