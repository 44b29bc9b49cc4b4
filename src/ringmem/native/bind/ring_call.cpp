// `kernel.call(message)`: a callable object that packs one message into its line, publishes it, and
// spins for the reply. Raw C API: what nanobind's argument handling costs is half of what the rest
// of a call costs.
#include "bind/ring_call.hpp"

#include <structmember.h>

#include <memory>
#include <string>

#include "bind/wait.hpp"

namespace ringmem::bind {
namespace {

struct Caller {
  std::vector<std::unique_ptr<CallChannel>> channels;
};

struct CallerObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Caller* caller;
};

PyObject *name_timeout, *name_ring, *name_out;  // interned

struct Arguments {
  PyObject* message = nullptr;
  PyObject* timeout = nullptr;
  PyObject* ring = nullptr;
  PyObject* out = nullptr;
};

// (message, timeout_s=None, *, ring=0, out=None); false with a Python error set.
bool parse(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, Arguments* parsed) {
  if (nargs != 1) [[unlikely]] {
    if (nargs != 2) {
      PyErr_Format(PyExc_TypeError,
                   "call() takes one message and a timeout_s by position, %zd were given", nargs);
      return false;
    }
    if (args[1] != Py_None) parsed->timeout = args[1];
  }
  parsed->message = args[0];
  const Py_ssize_t keywords = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, i);
    PyObject* value = args[nargs + i];
    const auto is = [name](PyObject* known) {
      return name == known || PyUnicode_Compare(name, known) == 0;
    };
    if (is(name_timeout)) {
      if (nargs == 2) {
        PyErr_SetString(PyExc_TypeError, "call() got timeout_s twice");
        return false;
      }
      parsed->timeout = value == Py_None ? nullptr : value;
    } else if (is(name_ring)) {
      parsed->ring = value;
    } else if (is(name_out)) {
      parsed->out = value == Py_None ? nullptr : value;
    } else {
      PyErr_Format(PyExc_TypeError, "call() got an unexpected argument '%U'", name);
      return false;
    }
  }
  return true;
}

CallChannel& channel_of(Caller& caller, PyObject* ring) {
  return *caller.channels[ring == nullptr ? 0 : ring_index(ring, caller.channels.size())];
}

// When a call must be over, and how its caller said so.
struct Limit {
  explicit Limit(PyObject* timeout)
      : timeout_s(timeout == nullptr ? std::nullopt : seconds_of(timeout)),
        deadline(deadline_of(timeout_s)) {}
  std::string text() const { return "timeout_s=" + std::to_string(timeout_s.value_or(0)); }

  const std::optional<double> timeout_s;
  const ring::Clock::time_point deadline;
};

// Takes the channel's turn; the GIL goes while another thread has it.
class Turn {
 public:
  Turn(CallChannel& channel, const Limit& limit)
      : channel_(channel), lock_(channel.turn, std::try_to_lock) {
    if (!lock_.owns_lock()) [[unlikely]] wait(channel, limit);
    channel.caller.store(pthread_self(), std::memory_order_relaxed);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() { channel_.caller.store({}, std::memory_order_relaxed); }

 private:
  void wait(const CallChannel& channel, const Limit& limit) {
    if (channel.caller.load(std::memory_order_relaxed) == pthread_self()) {
      throw InUse("this thread is in a call on this ring already, and a signal's handler would wait "
                  "for it for good; call on another ring");
    }
    for (;;) {
      require_process(*channel.producer);  // in a fork nobody gives it back
      const auto now = ring::Clock::now();
      if (now >= limit.deadline) {
        throw TimedOut("other threads' calls on this ring took all of " + limit.text() +
                       "; nothing was sent");
      }
      {
        const ReleaseGil released;
        if (lock_.try_lock_until(std::min(limit.deadline, now + std::chrono::milliseconds(20)))) {
          return;
        }
      }
      if (or_park([] { return PyErr_CheckSignals(); }) != 0) throw nb::python_error();
    }
  }

  CallChannel& channel_;
  std::unique_lock<std::timed_mutex> lock_;
};

// A kernel publishes what it took only some microseconds after its answer, so that the ring may look
// full for a moment.
void send_when_free(CallChannel& channel, const std::byte* record, const Limit& limit) {
  require_sound(*channel.producer, bad_head);
  for (;;) {
    // Late replies that nobody takes fill the other ring, and then this one.
    const auto until = settle(*channel.consumer)
                           ? limit.deadline
                           : std::min(limit.deadline,
                                      ring::Clock::now() + std::chrono::milliseconds(1));
    if (wait_for_slots(*channel.producer, 1, until)) break;
    if (ring::Clock::now() >= limit.deadline) {
      throw TimedOut("no free slot within " + limit.text() +
                     ": the ring is full of messages whose calls timed out");
    }
  }
  require_takes_calls(*channel.producer);  // or it would be the next run's
  channel.producer->endpoint.send(record, 1);
}

void send(CallChannel& channel, const std::byte* record, const Limit& limit) {
  auto& producer = channel.producer->endpoint;
  require_takes_calls(*channel.producer);
  require_nothing_queued(*channel.producer);
  require_not_awaited(*channel.consumer);
  if (channel.unread() != 0 || producer.reserved() != 0) [[unlikely]] {
    throw InvalidValue(std::to_string(channel.unread()) + " replies of messages that were sent on "
                       "this ring are unread, and " + std::to_string(producer.reserved()) +
                       " slots reserved; recv() and commit() first, or call on another ring");
  }
  if (producer.send(record, 1) != 1) [[unlikely]] send_when_free(channel, record, limit);
}

// The reply of the newest message is the next to read, and there; false: the time is up.
bool wait_for_reply(CallChannel& channel, const Limit& limit) {
  auto& consumer = channel.consumer->endpoint;
  if (channel.consumer->abandoned == 0) {
    // No pause between looks: on some processors one takes as long as all of the rest.
    const auto until = ring::Clock::now() + gil_hold;
    do {
      for (int look = 0; look < 64; ++look) {
        if (consumer.poll(1).size() != 0) return true;
      }
    } while (ring::Clock::now() < until);
  }
  return wait_for_message(*channel.consumer, limit.deadline);
}

[[noreturn]] void raise_handler_error(ring::i32 status, nb::object reply) {
  nb::object cls = nb::module_::import_("ringmem.native.errors").attr("HandlerError");
  nb::object error = cls(status, reply);
  PyErr_SetObject(cls.ptr(), error.ptr());
  throw nb::python_error();
}

// The reply as a new scalar, or in `out`; its slot is given back.
nb::object take_reply(CallChannel& channel, nb::handle out, const Records& target) {
  auto& consumer = channel.consumer->endpoint;
  const layout::Line* slot = consumer.poll(1).first.lines;
  const ring::i32 status = layout::word_status(ring::load_word(*slot));
  const void* data = slot->payload;
  if (channel.reply.nbytes() > layout::line_payload_nbytes) {
    ring::unpack(channel.scratch.data(), slot, channel.reply.nbytes());
    data = channel.scratch.data();
  }
  nb::object result;
  if (out.is_valid()) {
    std::memcpy(target.data, data, channel.reply.nbytes());
    result = nb::borrow(out);
  } else {
    result = nb::steal(channel.reply.make(data));
  }
  consumer.release(1);
  if (!result.is_valid()) throw nb::python_error();
  if (status != 0) [[unlikely]] raise_handler_error(status, result);
  return result;
}

Records target_of(CallChannel& channel, PyObject* out) {
  if (out == nullptr) return {};
  Records target = writable_records_of(out, channel.reply.dtype());
  if (target.size != 1) {
    throw InvalidValue("out has " + std::to_string(target.size) + " elements; a call has one reply");
  }
  return target;
}

nb::object call(Caller& caller, const Arguments& arguments) {
  CallChannel& channel = channel_of(caller, arguments.ring);
  Records slow;
  const std::byte* record = channel.message.bytes_of(arguments.message);
  if (record == nullptr) [[unlikely]] {
    slow = records_of(arguments.message, channel.message.dtype());
    if (slow.size != 1) {
      throw InvalidValue("a call takes one message, " + std::to_string(slow.size) +
                         " were given; send() takes batches");
    }
    record = slow.data;
  }
  const Records target = target_of(channel, arguments.out);
  const Limit limit(arguments.timeout);
  const Turn turn(channel, limit);
  const Use<ring::Producer> sending(*channel.producer);
  const Use<ring::Consumer> receiving(*channel.consumer);
  send(channel, record, limit);
  bool in_time = false;
  try {
    in_time = wait_for_reply(channel, limit);
  } catch (...) {
    ++channel.consumer->abandoned;
    throw;
  }
  if (!in_time) {
    ++channel.consumer->abandoned;
    throw TimedOut("no reply within " + limit.text() + "; it will be dropped when it comes");
  }
  return take_reply(channel, arguments.out, target);
}

PyObject* vectorcall(PyObject* object, PyObject* const* args, std::size_t flags, PyObject* kwnames) {
  try {
    Arguments arguments;
    if (!parse(args, PyVectorcall_NARGS(flags), kwnames, &arguments)) return nullptr;
    return call(*reinterpret_cast<CallerObject*>(object)->caller, arguments).release().ptr();
  } catch (...) {
    set_ring_error();
    return nullptr;
  }
}

// settle(): where nobody reads. An end that somebody uses is settled by whoever that is.
PyObject* settle_idle(PyObject* object, PyObject*) {
  for (const auto& channel : reinterpret_cast<CallerObject*>(object)->caller->channels) {
    NativeConsumer& consumer = *channel->consumer;
    if (consumer.abandoned == 0 || consumer.closed.load() ||
        consumer.generation != fork_generation() ||
        consumer.busy.exchange(true, std::memory_order_acquire)) {
      continue;
    }
    settle(consumer);
    consumer.busy.store(false, std::memory_order_release);
  }
  Py_RETURN_NONE;
}

PyObject* unread(PyObject* object, PyObject* ring) {
  try {
    CallChannel& channel = channel_of(*reinterpret_cast<CallerObject*>(object)->caller, ring);
    return PyLong_FromUnsignedLongLong(channel.unread());
  } catch (...) {
    set_ring_error();
    return nullptr;
  }
}

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<CallerObject*>(object);
  delete self->caller;
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"settle", settle_idle, METH_NOARGS,
     "settle()\n--\n\nDrop the replies whose calls gave up, as far as they are there."},
    {"unread", unread, METH_O,
     "unread(ring)\n--\n\nMessages sent whose replies were not read, calls that timed out aside."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallerObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Sends one message and waits for its reply.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {
    "ringmem.native._native.RingCaller", sizeof(CallerObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_VECTORCALL, slots};

PyTypeObject* caller_type = nullptr;

nb::object make_caller(nb::list producers, nb::list consumers) {
  if (producers.size() != consumers.size() || producers.size() == 0) {
    throw InvalidValue("as many producers as consumers, and at least one, make a caller");
  }
  auto caller = std::make_unique<Caller>();
  for (std::size_t i = 0; i < producers.size(); ++i) {
    caller->channels.push_back(std::make_unique<CallChannel>(producers[i], consumers[i]));
  }
  auto* object = PyObject_New(CallerObject, caller_type);
  if (object == nullptr) throw nb::python_error();
  object->vectorcall = vectorcall;
  object->caller = caller.release();
  return nb::steal(reinterpret_cast<PyObject*>(object));
}

}  // namespace

void bind_ring_call(nb::module_& m) {
  name_timeout = PyUnicode_InternFromString("timeout_s");
  name_ring = PyUnicode_InternFromString("ring");
  name_out = PyUnicode_InternFromString("out");
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) nb::raise_python_error();
  caller_type = reinterpret_cast<PyTypeObject*>(type);
  m.attr("RingCaller") = nb::steal(type);
  m.def("make_caller", &make_caller, nb::arg("producers"), nb::arg("consumers"),
        "The callable that serves these ring pairs.");
}

}  // namespace ringmem::bind
