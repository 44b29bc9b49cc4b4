// launch_host_function for a Python callable. It runs on a driver thread, which must not ask for
// the GIL once the interpreter goes down: from Python's atexit on, no callable starts any more. One
// that runs on for longer is parked, with its stream.
#include "bind/driver_call.hpp"
#include "bind/gil.hpp"

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace ringmem::bind {
namespace {

using namespace nb::literals;

std::atomic<bool> closing{false};
std::atomic<int> running{0};

struct HostCall {
  nb::callable function;
};

// Announces a use of the interpreter from a driver thread; false once it is closing. Sequential
// consistency makes one of the two sides see the other: this one `closing`, or close_down `running`.
class Admission {
 public:
  Admission() {
    running.fetch_add(1);
    admitted_ = !closing.load();
  }
  ~Admission() { running.fetch_sub(1); }
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;
  explicit operator bool() const { return admitted_; }

 private:
  bool admitted_;
};

void run(void* argument) {
  Admission admission;
  if (!admission) return;  // leaks the callable: there is no interpreter left to give it back to
  const HoldGil gil;
  const std::unique_ptr<HostCall> call(static_cast<HostCall*>(argument));
  try {
    call_or_park(call->function);
  } catch (nb::python_error& error) {
    or_park([&] { error.discard_as_unraisable(call->function); });
  }
}

// Waits for callables that have started, but not for ever: one may wait for something that never
// comes, and a process must be able to end.
void close_down() {
  constexpr auto patience = std::chrono::seconds(5);
  closing.store(true);
  ReleaseGil release;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (running.load() != 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void launch(Driver& driver, int device, StreamHandle stream, nb::callable function) {
  static std::atomic<bool> registered{false};
  if (!registered.load(std::memory_order_relaxed) && !registered.exchange(true)) {
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&close_down));
  }
  auto call = std::make_unique<HostCall>(HostCall{std::move(function)});
  RINGMEM_CALL(launch_host_function, (device, stream, &run, call.get()), {"device", device},
               Argument::hex("stream", stream));
  call.release();  // `run` owns it now
}

}  // namespace

void bind_host_function(nb::class_<Driver>& cls) {
  cls.def("launch_host_function", &launch, "device"_a, "stream"_a, "function"_a,
          "Call `function()` on a driver thread in stream order. It must make no driver call; an "
          "exception goes to `sys.unraisablehook`.");
}

}  // namespace ringmem::bind
