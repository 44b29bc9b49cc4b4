// What becomes of the ring room's own threads when the system has none left: an error with a name,
// nothing left behind that points to what is gone, and the next one works.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver/status.hpp"
#include "ring/memory.hpp"
#include "ring/poller.hpp"
#include "ring/watchdog.hpp"

using namespace ringmem;
using namespace ringmem::ring;
using namespace std::chrono_literals;

namespace {
std::atomic<bool> no_threads{false};
}

// In place of the C library's: libstdc++ calls the first that the program has.
extern "C" [[gnu::visibility("default")]] int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(::dlsym(RTLD_NEXT, "pthread_create"));
  return no_threads ? EAGAIN : real(thread, attributes, body, argument);
}

namespace {

template <class Request>
void is_refused(const Request& request) {
  no_threads = true;
  try {
    request();
    CHECK(false);
  } catch (const DriverError& error) {
    CHECK_EQ(error.status, Status::operating_system);
    CHECK_EQ(error.operation, std::string("pthread_create"));
  }
  no_threads = false;
}

struct Blocks {
  Blocks() : geometry(make_geometry(8, 56)), memory(SharedMemory::create(3 * 4096)) {
    auto* at = static_cast<std::byte*>(memory.data());
    pair.control = reinterpret_cast<layout::ControlBlock*>(at);
    pair.telemetry = reinterpret_cast<layout::TelemetryBuffer*>(at + 1024);
    pair.input = reinterpret_cast<layout::RingHeader*>(at + 4096);
    pair.output = reinterpret_cast<layout::RingHeader*>(at + 8192);
    format(pair.input, geometry.nbytes(), geometry);
    format(pair.output, geometry.nbytes(), geometry);
  }
  Geometry geometry;
  SharedMemory memory;
  KernelPair pair;
};

u64 beats(const Blocks& blocks) { return load(blocks.pair.control->heartbeat); }

}  // namespace

TEST(a_watchdog_without_a_thread_looks_at_nothing_afterwards) {
  std::optional<Blocks> first(std::in_place);
  is_refused([&] { Watchdog::instance().watch({first->pair}, 1s); });
  const Blocks second;
  const auto id = Watchdog::instance().watch({second.pair}, 1s);
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (beats(second) < 3 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(beats(second) >= 3);
  CHECK_EQ(beats(*first), 0u);
  Watchdog::instance().forget(id);
}

TEST(a_parked_wait_without_a_thread_leaves_nothing_registered) {
  Poller poller;
  is_refused([&] { poller.wait([] { return false; }, std::chrono::steady_clock::now() + 10s); });
  CHECK_EQ(poller.registered(), 0u);
  CHECK(!poller.running());
  CHECK(!poller.wait([] { return false; }, std::chrono::steady_clock::now() + 5ms));
  CHECK(poller.wait([] { return true; }, std::chrono::steady_clock::now() + 10s));
  // It counted nobody too many: with nobody there it leaves.
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (poller.running() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(10ms);
  }
  CHECK(!poller.running());
}

TEST(a_watch_that_could_not_be_armed_can_be_armed_later) {
  Poller poller;
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const auto id = poller.watch(fd);
  is_refused([&] { poller.arm(id, [] { return true; }); });
  std::uint64_t count = 0;
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  poller.arm(id, [] { return true; });
  while (::read(fd, &count, sizeof count) < 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK_EQ(count, 1u);
  poller.unwatch(id);
  while (poller.running() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(10ms);
  }
  CHECK(!poller.running());
  ::close(fd);
}

TEST_MAIN()
