// Python's side of the host endpoints. Addresses and counts cross here; NumPy views of the slots
// are made once by the Python floor, which slices them.
#include "bind/ring.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <exception>

#include "bind/lazily.hpp"
#include "bind/wait.hpp"
#include "ring/memory.hpp"

namespace ringmem::bind {
namespace {

using ring::u64;

// --- errors ----------------------------------------------------------------------------------------
void raise(const char* name, const char* text) {
  nb::object cls = nb::module_::import_("ringmem.native.errors").attr(name);
  PyErr_SetString(cls.ptr(), text);
}

void translate(const std::exception_ptr& pointer, void*) {
  if (!pointer) park_for_good();  // pthread_exit(): the interpreter ends
  try {
    std::rethrow_exception(pointer);
  } catch (const ring::Corrupted& error) {
    raise("CorruptedError", error.what());
  } catch (const TimedOut& error) {
    raise("TimeoutError", error.what());
  } catch (const InUse& error) {
    raise("RingmemError", error.what());
  }
}

// --- construction ----------------------------------------------------------------------------------
// Of two threads only one gets a free end. (Two processes may both: nothing orders them.)
nb::ft_mutex claim_mutex;

// Only host endpoints sign, and only they can tell that a line is taken.
template <class IndexLine>
void claim(IndexLine& line, bool force, const char* what) {
  const nb::ft_lock_guard lock(claim_mutex);
  const ring::ProcessId holder = ring::signature(line);
  if (!force && holder.pid != 0 && ring::is_alive(holder)) {
    throw InvalidValue("the ring has a " + std::string(what) + " already, in process " +
                       std::to_string(holder.pid) + "; close that one, or pass force=True");
  }
  ring::sign(line, ring::this_process());
}

ring::RingView view_at(u64 ptr, u64 nbytes, nb::handle message) {
  ring::RingView view = ring::attach(reinterpret_cast<void*>(ptr), nbytes);
  const auto itemsize = nb::cast<u64>(message.attr("itemsize"));
  if (itemsize != view.geometry.message_nbytes) {
    throw InvalidValue("message=" + nb::cast<std::string>(nb::str(message)) + " has " +
                       std::to_string(itemsize) + " bytes; the ring's messages have " +
                       std::to_string(view.geometry.message_nbytes));
  }
  return view;
}

void new_producer(NativeProducer* self, u64 ptr, u64 nbytes, nb::object message, nb::object owner,
                  bool force) {
  const ring::RingView view = view_at(ptr, nbytes, message);
  claim(*view.producer, force, "producer");
  new (self) NativeProducer(view, std::move(owner), std::move(message));
}

void new_consumer(NativeConsumer* self, u64 ptr, u64 nbytes, nb::object message, nb::object owner,
                  bool force) {
  const ring::RingView view = view_at(ptr, nbytes, message);
  claim(*view.consumer, force, "consumer");
  new (self) NativeConsumer(view, std::move(owner), std::move(message));
}

// --- producer --------------------------------------------------------------------------------------
// Slots reserved, as (index of the first slot, count).
std::pair<u64, u64> reserve(NativeProducer& self, u64 count, bool all,
                            nb::handle timeout) {
  const Use use(self);
  const std::optional<double> timeout_s = seconds_of(timeout);
  require_nothing_queued(self);
  if (all && count > self.endpoint.capacity()) {
    throw InvalidValue("n=" + std::to_string(count) + " is more than the ring's " +
                       std::to_string(self.endpoint.capacity()) + " slots; reserve in parts");
  }
  if (all && !wait_for_slots(self, count, deadline_of(timeout_s))) {
    throw TimedOut("no " + std::to_string(count) + " free slots within timeout_s=" +
                   std::to_string(*timeout_s));
  }
  const u64 got = self.endpoint.reserve(count).size();
  require_sound(self, bad_head);
  return {static_cast<u64>(self.endpoint.tail()) & (self.endpoint.capacity() - 1), got};
}

void commit(NativeProducer& self, u64 count) {
  const Use use(self);
  if (count > self.endpoint.reserved()) {
    throw InvalidValue("n=" + std::to_string(count) + " is more than the " +
                       std::to_string(self.endpoint.reserved()) + " reserved slots");
  }
  self.endpoint.commit(count);
}

// The error in flight, as Python's, says in `sent` how many messages were accepted before it.
[[noreturn]] void raise_with_sent(u64 sent) {
  set_ring_error();
  nb::python_error error;
  const nb::object count = nb::steal(PyLong_FromUnsignedLongLong(sent));
  if (!count.is_valid() || PyObject_SetAttrString(error.value().ptr(), "sent", count.ptr()) != 0) {
    PyErr_Clear();  // the error itself matters more
  }
  throw error;
}

// (messages accepted, messages given): all of them when `wait`, unless the time is up.
std::pair<u64, u64> send(NativeProducer& self, nb::handle batch, bool wait, nb::handle timeout) {
  const Use use(self);
  const std::optional<double> timeout_s = seconds_of(timeout);
  require_nothing_queued(self);
  if (self.endpoint.reserved() != 0) [[unlikely]] {
    throw InvalidValue(std::to_string(self.endpoint.reserved()) + " slots are reserved and not "
                       "committed; commit() first, or give them back with commit(0)");
  }
  const Records records = records_of(batch, self.message);
  const std::size_t nbytes = self.endpoint.geometry().message_nbytes;
  u64 sent = self.endpoint.send(records.data, records.size);
  require_sound(self, bad_head);
  if (!wait || sent == records.size) return {sent, records.size};
  const auto deadline = deadline_of(timeout_s);
  try {
    while (sent < records.size) {
      // A quarter of the ring at a time: waking for every slot would serve nobody.
      const u64 wanted =
          std::min(records.size - sent, std::max<u64>(self.endpoint.capacity() / 4, 1));
      const bool in_time = wait_for_slots(self, wanted, deadline);
      sent += self.endpoint.send(records.data + sent * nbytes, records.size - sent);
      require_sound(self, bad_head);
      if (!in_time) break;
    }
  } catch (...) {
    raise_with_sent(sent);
  }
  return {sent, records.size};
}

// --- consumer --------------------------------------------------------------------------------------
std::pair<u64, u64> poll_slots(NativeConsumer& self, u64 max) {
  const Use use(self);
  require_not_awaited(self);
  const u64 ready = settle(self) ? self.endpoint.poll(max).size() : 0;
  self.shown = ready;
  if (ready == 0) require_sound(self, bad_line);
  return {static_cast<u64>(self.endpoint.head()) & (self.endpoint.capacity() - 1), ready};
}

// What was only waited for has been shown to nobody, so it cannot be released.
void release(NativeConsumer& self, u64 count) {
  const Use use(self);
  if (count > self.shown) {
    throw InvalidValue("n=" + std::to_string(count) + " is more than the " +
                       std::to_string(self.shown) + " polled slots: what the last poll() returned");
  }
  self.endpoint.release(count);
  self.shown = self.shown - count;
}

// All that the last poll() returned and nobody released yet.
void release_shown(NativeConsumer& self) {
  const Use use(self);
  self.endpoint.release(self.shown);
  self.shown = 0;
}

// How many messages are there for the reader, at most `max`; shows none.
u64 ready(NativeConsumer& self, u64 max) {
  const Use use(self);
  require_not_awaited(self);
  const u64 ready = settle(self) ? self.endpoint.poll(max).size() : 0;
  if (ready == 0) require_sound(self, bad_line);
  return ready;
}

u64 peek(NativeConsumer& self, nb::handle out) {
  const Use use(self);
  const Records records = writable_records_of(out, self.message);
  return self.endpoint.peek(records.data, records.size);
}

// Waits for the first message, then takes what is there. 0: the time is up.
u64 receive(NativeConsumer& self, nb::handle out, u64 max, nb::handle timeout, nb::handle statuses) {
  const Use use(self);
  const std::optional<double> timeout_s = seconds_of(timeout);
  require_not_awaited(self);
  const Records records = writable_records_of(out, self.message);
  ring::i32* status_data = nullptr;
  Records status_records;
  if (!statuses.is_none()) {
    static constinit Lazily<PyObject*> known;
    PyObject* const int32 = known.get([] {
      return nb::object(nb::module_::import_("numpy").attr("dtype")("int32")).release().ptr();
    });
    status_records = writable_records_of(statuses, nb::handle(int32), "statuses");
    status_data = reinterpret_cast<ring::i32*>(status_records.data);
    max = std::min(max, status_records.size);
  }
  max = std::min(max, records.size);
  u64 got = settle(self) ? self.endpoint.receive(records.data, max, status_data) : 0;
  if (got == 0 && max != 0 && wait_for_message(self, deadline_of(timeout_s))) {
    got = self.endpoint.receive(records.data, max, status_data);
  }
  if (got == 0) require_sound(self, bad_line);
  self.shown = self.shown - std::min<u64>(self.shown, got);
  return got;
}

// --- watches ---------------------------------------------------------------------------------------
// An eventfd that the poller writes to once for each arm_…(), for an event loop. Python holds the
// object around each call.
class Watch {
 public:
  explicit Watch(int fd) : id_(ring::Poller::instance().watch(fd)) {}
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() { close(); }

  // The poller looks with a copy of the endpoint: its thread may go on using the original.
  void arm_receive(NativeConsumer& consumer) {
    const Use use(consumer);
    keep_ = consumer.owner;
    arm([endpoint = consumer.endpoint] { return endpoint.would_receive(); });
  }
  void arm_reserve(NativeProducer& producer, u64 wanted) {
    const Use use(producer);
    wanted = std::min(wanted, producer.endpoint.capacity());
    keep_ = producer.owner;
    arm([endpoint = producer.endpoint, wanted] { return endpoint.would_reserve(wanted); });
  }
  void close() {
    if (!open_) return;
    open_ = false;
    if (generation_ == fork_generation()) ring::Poller::instance().unwatch(id_);
  }

 private:
  void arm(ring::Poller::Ready ready) {
    if (!open_ || generation_ != fork_generation()) throw Closed("the watch is closed");
    ring::Poller::instance().arm(id_, std::move(ready));
  }

  ring::Poller::WatchId id_;
  nb::object keep_;  // the memory that the poller looks at
  std::uint64_t generation_ = fork_generation();
  bool open_ = true;
};

template <class Native>
void bind_wait_settings(nb::class_<Native>& cls) {
  cls.def_prop_rw(
      "spin_us", [](const Native& self) { return self.wait.spin_us.load(); },
      [](Native& self, double spin_us) { self.wait.spin_us = checked_spin_us(spin_us); },
      "Microseconds that a wait spins before it parks; negative: it never parks.");
  cls.def_prop_rw(
      "on_wait", &Native::get_on_wait, &Native::set_on_wait,
      nb::arg("on_wait").none(),
      "Called without arguments every 20 ms of a wait; raises what makes waiting hopeless.");
  cls.def_prop_ro("message", [](const Native& self) { return self.message; });
  cls.def_prop_ro("capacity", [](const Native& self) { return self.endpoint.capacity(); });
  cls.def_prop_ro("closed", [](const Native& self) { return self.closed.load(); });
  cls.def_prop_ro("corrupted", [](const Native& self) { return self.endpoint.corrupted(); });
}

}  // namespace

// --- what other binding files use too -----------------------------------------------------------------
void set_ring_error() noexcept {
  if (std::current_exception() == nullptr) park_for_good();  // no C++ exception: the thread's end
  try {
    translate(std::current_exception(), nullptr);
  } catch (...) {
    set_python_error();
  }
}

Records records_of(nb::handle batch, nb::handle message) {
  const NumpyArrayFields* array = numpy_array_of(batch, message);
  if (array != nullptr && (array->flags & numpy_c_contiguous) != 0) [[likely]] {
    return {reinterpret_cast<std::byte*>(array->data), numpy_size(*array), {}};
  }
  nb::object bytes = nb::module_::import_("ringmem.native.records").attr("as_bytes")(batch, message);
  nb::object address = bytes.attr("ctypes").attr("data");
  const auto itemsize = nb::cast<u64>(message.attr("itemsize"));
  return {reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(address)),
          nb::cast<u64>(bytes.attr("nbytes")) / itemsize, bytes};
}

Records writable_records_of(nb::handle array_object, nb::handle message, const char* name) {
  const NumpyArrayFields* array = numpy_array_of(array_object, message);
  constexpr int needed = numpy_c_contiguous | numpy_writeable;
  if (array != nullptr && (array->flags & needed) == needed) [[likely]] {
    return {reinterpret_cast<std::byte*>(array->data), numpy_size(*array), {}};
  }
  nb::object bytes =
      nb::module_::import_("ringmem.native.records").attr("as_writable_bytes")(array_object, message,
                                                                           name);
  nb::object address = bytes.attr("ctypes").attr("data");
  const auto itemsize = nb::cast<u64>(message.attr("itemsize"));
  return {reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(address)),
          nb::cast<u64>(bytes.attr("nbytes")) / itemsize, bytes};
}

void bind_ring(nb::module_& m) {
  nb::register_exception_translator(translate);

  nb::class_<ring::SharedMemory>(m, "SharedMemory", "Memory that other processes can map too.")
      .def_static("create", &ring::SharedMemory::create, nb::arg("nbytes"))
      .def_static("map", &ring::SharedMemory::map, nb::arg("fd"))
      .def_prop_ro("ptr", [](const ring::SharedMemory& self) {
        return reinterpret_cast<std::uintptr_t>(self.data());
      })
      .def_prop_ro("nbytes", &ring::SharedMemory::nbytes)
      .def_prop_ro("fd", &ring::SharedMemory::fd);

  m.def(
      "ring_nbytes",
      [](u64 capacity, u64 message_nbytes) {
        return ring::make_geometry(capacity, message_nbytes).nbytes();
      },
      nb::arg("capacity"), nb::arg("message_nbytes"), "Bytes of a ring, header included.");
  m.def(
      "ring_format",
      [](u64 ptr, u64 nbytes, u64 capacity, u64 message_nbytes, bool zeroed) {
        ring::format(reinterpret_cast<void*>(ptr), nbytes,
                     ring::make_geometry(capacity, message_nbytes), zeroed);
      },
      nb::arg("ptr"), nb::arg("nbytes"), nb::arg("capacity"), nb::arg("message_nbytes"),
      nb::arg("zeroed"), "Make an empty ring of memory at a multiple of 128 bytes.");
  m.def(
      "ring_geometry",
      [](u64 ptr, u64 nbytes) {
        const auto geometry = ring::attach(reinterpret_cast<void*>(ptr), nbytes).geometry;
        return std::pair(geometry.capacity, geometry.message_nbytes);
      },
      nb::arg("ptr"), nb::arg("nbytes"), "(capacity, message_nbytes) of the ring made there.");

  nb::class_<NativeProducer> producer(m, "RingProducer");
  producer
      .def("__init__", &new_producer, nb::arg("ptr"), nb::arg("nbytes"), nb::arg("message"),
           nb::arg("owner"), nb::arg("force") = false)
      .def("reserve", &reserve, nb::arg("count"), nb::arg("all"), nb::arg("timeout_s").none())
      .def("commit", &commit, nb::arg("count"))
      .def("send", &send, nb::arg("batch").none(), nb::arg("wait"), nb::arg("timeout_s").none())
      .def("drop", [](NativeProducer& self, u64 count) {
        const Use use(self);
        self.endpoint.drop(count);
      }, nb::arg("count"))
      .def("free_slots", [](NativeProducer& self) {
        const Use use(self);
        return self.endpoint.free_slots(self.endpoint.capacity());
      })
      .def("allow_streaming", [](NativeProducer& self, bool allowed) {
        const Use use(self);
        self.endpoint.allow_streaming(allowed);
      }, nb::arg("allowed"), "Whether send() may write past the caches: to readers in order only.")
      .def_prop_rw("takes_calls",
                   [](const NativeProducer& self) { return self.takes_calls.load(); },
                   [](NativeProducer& self, bool takes) { self.takes_calls = takes; })
      .def_prop_ro("tail", [](const NativeProducer& self) { return self.endpoint.tail(); })
      .def_prop_ro("reserved", [](const NativeProducer& self) { return self.endpoint.reserved(); })
      .def_prop_ro("dropped", [](const NativeProducer& self) { return self.endpoint.dropped(); })
      .def_prop_ro("peer_closed",
                   [](const NativeProducer& self) { return self.endpoint.consumer_closed(); })
      .def("close", &NativeProducer::close);
  bind_wait_settings(producer);

  nb::class_<NativeConsumer> consumer(m, "RingConsumer");
  consumer
      .def("__init__", &new_consumer, nb::arg("ptr"), nb::arg("nbytes"), nb::arg("message"),
           nb::arg("owner"), nb::arg("force") = false)
      .def("poll", &poll_slots, nb::arg("max"))
      .def("ready", &ready, nb::arg("max"))
      .def("release", &release, nb::arg("count"))
      .def("release_shown", &release_shown)
      .def("peek", &peek, nb::arg("out").none())
      .def("receive", &receive, nb::arg("out").none(), nb::arg("max"), nb::arg("timeout_s").none(),
           nb::arg("statuses").none())
      .def("wait", [](NativeConsumer& self, nb::handle timeout) {
        const Use use(self);
        require_not_awaited(self);
        return wait_for_message(self, deadline_of(seconds_of(timeout)));
      }, nb::arg("timeout_s").none())
      .def_prop_ro("head", [](const NativeConsumer& self) { return self.endpoint.head(); })
      .def_prop_ro("shown", [](const NativeConsumer& self) -> u64 { return self.shown; })
      .def_prop_ro("depth", [](const NativeConsumer& self) { return self.endpoint.depth(); })
      .def_prop_ro("dropped", [](const NativeConsumer& self) { return self.endpoint.dropped(); })
      .def_prop_ro("peer_closed",
                   [](const NativeConsumer& self) { return self.endpoint.producer_closed(); })
      .def("close", &NativeConsumer::close);
  bind_wait_settings(consumer);

  nb::class_<Watch>(m, "RingWatch", "Writes to an eventfd once for each arming.")
      .def(nb::init<int>(), nb::arg("fd"))
      .def("arm_receive", &Watch::arm_receive, nb::arg("consumer"), nb::lock_self())
      .def("arm_reserve", &Watch::arm_reserve, nb::arg("producer"), nb::arg("wanted"),
           nb::lock_self())
      .def("close", &Watch::close, nb::lock_self());
  m.def("set_poll_interval_us", [](std::int64_t us) {
    if (us < 1 || us > 1'000'000) {
      throw InvalidValue("interval_us=" + std::to_string(us) + " must be 1 to 1000000");
    }
    ring::Poller::instance().set_interval(std::chrono::microseconds(us));
  }, nb::arg("interval_us"));
  m.def("poll_interval_us", [] { return ring::Poller::instance().interval().count(); });
}

}  // namespace ringmem::bind
