// Allocators that come from Python: a user's object with allocate and deallocate, and the native
// allocators of pinned and managed memory under their Python names.
#include "bind/buffer.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/host_allocators.hpp"
#include "memory/reaper.hpp"
#include "memory/stream_records.hpp"

namespace ringmem::bind {
namespace {

// A user's object as an Allocator. Streams that used a block are made to be waited for, on the
// device, by the stream it is freed on: the object need not know them.
class PythonAllocator final : public StreamRecords {
 public:
  PythonAllocator(nb::object object, DriverRef driver, int device)
      : StreamRecords(std::move(driver), device), object_(std::move(object)) {}

  ~PythonAllocator() override {
    if (!nb::is_alive()) {
      object_.release();
      return;
    }
    HoldGil gil;
    object_.reset();
  }

  Block allocate(std::size_t nbytes, StreamHandle stream) override {
    HoldGil gil;
    nb::object answer = or_park([&] { return object_.attr("allocate")(nbytes, stream); });
    Block block;
    block.nbytes = nbytes;
    if (!answer.is_none() && !nb::try_cast(answer, block.ptr)) {
      throw InvalidValue("allocate() returned " + std::string(nb::repr(answer).c_str()) +
                         ": the address of " + std::to_string(nbytes) + " bytes was due");
    }
    return block;
  }

  Status deallocate(const Block& block, StreamHandle stream) noexcept override {
    UsedStreams* streams = recorded(block);
    if (streams) {
      for (const auto& other : *streams) {
        if (!other->closed() && other->handle() == stream) continue;
        if (Status status = other->order_before(device_, stream); !ok(status)) return status;
      }
    }
    try {
      HoldGil gil;
      try {
        or_park([&] { object_.attr("deallocate")(block.ptr, block.nbytes, stream); });
      } catch (nb::python_error& error) {
        error.restore();
        keep_python_error();
        return Status::unknown;
      }
    } catch (...) {
      return Status::unknown;
    }
    delete streams;
    return Status::success;
  }

 private:
  nb::object object_;
};

std::atomic<bool> adapted_any{false};

std::shared_ptr<Allocator> adapt(nb::object object, NativeDevice& device) {
  for (const char* name : {"allocate", "deallocate"}) {
    nb::object method = nb::getattr(object, name, nb::none());
    if (!PyCallable_Check(method.ptr())) {
      throw InvalidValue("allocator is " + std::string(nb::repr(object).c_str()) +
                         ": it has no " + name + "(); give an object with allocate(nbytes, " +
                         "stream) and deallocate(ptr, nbytes, stream)");
    }
  }
  adapted_any.store(true);
  return std::make_shared<PythonAllocator>(std::move(object), device.driver, device.ordinal);
}

ManagedAttach attach_of(const std::string& name) {
  if (name == "global") return ManagedAttach::global;
  if (name == "host") return ManagedAttach::host;
  if (name == "single") return ManagedAttach::single;
  throw InvalidValue("attach is '" + name + "': give 'global', 'host' or 'single'");
}

// --- the reaper's news for Python ----------------------------------------------------------------

// The reaper's thread never takes the GIL: at exit that would end the process badly. It asks the
// main thread instead; what finds that queue full is done at the next occasion.

int collect_done(void*) {
  Reaper::instance().collect();
  return 0;
}

// The text of a warning; the main thread makes it.
int warn_from_main(void* text) {
  std::unique_ptr<std::string> message(static_cast<std::string*>(text));
  warn_or_park(PyExc_RuntimeWarning, message->c_str());
  return 0;
}

void report_lost(const std::string& what, Status status) {
  auto text = std::make_unique<std::string>(what + " failed: " + status_name(status) +
                                            "; the memory is lost to this process");
  if (Py_AddPendingCall(warn_from_main, text.get()) == 0) text.release();
}

// How long the end of Python waits for releases under way; a persistent kernel holds up some for ever.
constexpr double exit_wait_s = 0.2;

void retire_reaper() {
  Reaper& reaper = Reaper::instance();
  bool done;
  {
    ReleaseGil release;
    done = reaper.flush(exit_wait_s);
  }
  reaper.retire();
  reaper.collect();
  // Jobs that still wait hold Python objects. So do adapted allocators: with a user's globals that
  // makes cycles that the collector cannot see, which matters only to a report at exit.
  if (!done || adapted_any.load()) nb::set_leak_warnings(false);
}

void connect_reaper() {
  Reaper::Hooks hooks;
  hooks.done = [] { Py_AddPendingCall(collect_done, nullptr); };
  hooks.failed = report_lost;
  Reaper::instance().set_hooks(hooks);
  nb::object at_exit = nb::module_::import_("atexit").attr("register");
  at_exit(nb::cpp_function(&drop_spare_objects));
  at_exit(nb::cpp_function(&retire_reaper));
}

}  // namespace

void bind_buffer_allocators(nb::module_& m) {
  connect_reaper();
  nb::class_<PythonAllocator, Allocator>(m, "PythonAllocator", "A Python object as an Allocator.");
  nb::class_<PinnedAllocator, Allocator>(m, "PinnedAllocator", "Page-locked memory of the driver.")
      .def("__init__", [](PinnedAllocator* self, NativeDevice& device, bool write_combined) {
        HostFlags flags;
        flags.write_combined = write_combined;
        new (self) PinnedAllocator(device.driver, device.ordinal, flags);
      }, nb::arg("device"), nb::arg("write_combined") = false);
  nb::class_<ManagedAllocator, Allocator>(m, "ManagedAllocator", "Managed memory of the driver.")
      .def("__init__", [](ManagedAllocator* self, NativeDevice& device, const std::string& attach) {
        new (self) ManagedAllocator(device.driver, device.ordinal, attach_of(attach));
      }, nb::arg("device"), nb::arg("attach") = "global");
  m.def("python_allocator", &adapt, nb::arg("object").none(), nb::arg("device"),
        "An object with allocate(nbytes, stream) and deallocate(ptr, nbytes, stream), adapted.");
  m.def("flush_reaper", [](double timeout_s) {
    bool done;
    {
      ReleaseGil release;
      done = Reaper::instance().flush(timeout_s);
    }
    Reaper::instance().collect();
    return done;
  }, nb::arg("timeout_s") = -1.0,
        "Waits for releases that the reaper has; False when the time was up. Negative: no limit.");
  m.def("hold_releases", [](bool held) { Reaper::instance().hold(held); }, nb::arg("held"),
        "While held, no release that waits for the device begins: a persistent kernel runs.");
  m.def("reaper_pending", [] { return Reaper::instance().pending(); },
        "Releases that the reaper has not done yet.");
}

extern PyType_Slot buffer_slots[];  // buffer_export.cpp

void bind_buffer(nb::module_& m) {
  nb::class_<Buffer> cls(m, "BufferBase", nb::type_slots(buffer_slots), nb::is_weak_referenceable(),
                         "Memory with a shape and a dtype; base of the classes of "
                         "ringmem.buffers.");
  bind_buffer_class(m, cls);
  bind_buffer_view(cls);
  bind_buffer_copy(m, cls);
  bind_buffer_export(m);
  bind_buffer_factory(m, cls);
  bind_buffer_dlpack(m);
  bind_buffer_allocators(m);
}

}  // namespace ringmem::bind
