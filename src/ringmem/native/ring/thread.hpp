// Making a thread that nobody joins, and saying so in our own words where the system has none left.
#pragma once

#include <exception>
#include <thread>
#include <utility>

#include "driver/status.hpp"

namespace ringmem::ring {

// Throws DriverError; then nothing runs. Before anything that would have to be taken back.
template <class Body>
void start_thread(Body&& body) {
  try {
    std::thread(std::forward<Body>(body)).detach();
  } catch (const std::exception& error) {  // also std::bad_alloc
    throw DriverError(Status::operating_system, "pthread_create", error.what());
  }
}

}  // namespace ringmem::ring
