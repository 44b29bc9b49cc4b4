// `await kernel.aio.call(message)`: sends at once, and completes whole batches of replies for each
// time that the event loop wakes. Belongs to the thread of one event loop at a time; every entry
// from Python holds the object (nothing with a GIL). Neither that nor the GIL is held through a call
// of Python, so nothing here relies on a state from before one.
#include "bind/ring_aio.hpp"

#include <structmember.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/ring_call.hpp"
#include "driver/fork.hpp"
#include "ring/poller.hpp"

namespace ringmem::bind {
namespace {

// Rounds of taking replies in a row before other work of the loop has its turn.
constexpr int max_rounds = 16;

struct AsyncChannel {
  AsyncChannel(nb::object producer, nb::object consumer)
      : ends(std::move(producer), std::move(consumer)) {}

  CallChannel ends;
  std::deque<ReplyObject*> pending;  // owned; oldest first; sent, then the ones in `waiting`
  std::deque<std::vector<std::byte>> waiting;  // messages that found the ring full
};

struct AsyncCaller {
  std::vector<std::unique_ptr<AsyncChannel>> channels;
  nb::object bind;      // bind(): gives this caller the running loop (attach), or raises
  nb::object check;     // check(): raises what ended the kernel, else starts looking from time to time
  PyObject* loop = nullptr;  // owned
  PyObject* running_loop;    // asyncio._get_running_loop
  int fd = -1;               // of the eventfd that the loop watches
  ring::Poller::WatchId watch = 0;
  std::uint64_t generation = fork_generation();
  bool armed = false, draining = false, checking = false;
  std::vector<ReplyObject*> finished;  // scratch of drain()
};

struct CallerObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  AsyncCaller* caller;
};

AsyncCaller& caller_of(PyObject* object) { return *reinterpret_cast<CallerObject*>(object)->caller; }

PyObject* name_ring;

// Lets the poller wake the loop when the first reply is there, or room for a message that waits. It
// looks with copies of the ends.
void arm(AsyncCaller& caller) {
  if (caller.armed || caller.draining) return;
  std::vector<ring::Consumer> readers;
  std::vector<ring::Producer> writers;
  for (const auto& channel : caller.channels) {
    if (!channel->pending.empty()) readers.push_back(channel->ends.consumer->endpoint);
    if (!channel->waiting.empty()) writers.push_back(channel->ends.producer->endpoint);
  }
  if (readers.empty()) return;
  ring::Poller::instance().arm(
      caller.watch, [readers = std::move(readers), writers = std::move(writers)] {
        for (const ring::Consumer& end : readers) {
          if (end.would_receive()) return true;
        }
        for (const ring::Producer& end : writers) {
          if (end.would_reserve(1)) return true;
        }
        return false;
      });
  caller.armed = true;
}

// Where another thread holds the producer, to be refused, the poller comes again.
void send_waiting(AsyncChannel& channel) {
  if (channel.waiting.empty()) return;
  NativeProducer& producer = *channel.ends.producer;
  if (producer.busy.exchange(true, std::memory_order_acquire)) return;
  while (!channel.waiting.empty() &&
         producer.endpoint.send(channel.waiting.front().data(), 1) == 1) {
    channel.waiting.pop_front();
  }
  producer.queued = channel.waiting.size();
  producer.busy.store(false, std::memory_order_release);
}

// The Python error in flight, which is no more.
PyObject* take_error() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value;
}

// What the slot holds, as the outcome of a call; where none can be made, the call gets that error.
void finish_one(CallChannel& ends, const layout::Line* slot, ReplyObject* reply) try {
  const void* data = slot->payload;
  if (ends.reply.nbytes() > layout::line_payload_nbytes) {
    ring::unpack(ends.scratch.data(), slot, ends.reply.nbytes());
    data = ends.scratch.data();
  }
  nb::object outcome = nb::steal(ends.reply.make(data));
  if (!outcome.is_valid()) throw nb::python_error();
  const ring::i32 status = layout::word_status(ring::load_word(*slot));
  if (status != 0) {
    outcome = nb::module_::import_("ringmem.native.errors").attr("HandlerError")(status, outcome);
  }
  settle_reply(reply, outcome.release().ptr(), status != 0);
} catch (...) {
  set_ring_error();
  settle_reply(reply, take_error(), true);
}

// Takes the replies that are there; returns whether there were any.
bool take_replies(AsyncCaller& caller, AsyncChannel& channel) {
  CallChannel& ends = channel.ends;
  const Use<ring::Consumer> receiving(*ends.consumer);
  const bool settled = settle(*ends.consumer);
  send_waiting(channel);
  const std::uint64_t sent = channel.pending.size() - channel.waiting.size();
  if (!settled || sent == 0) return false;
  const ring::Runs runs = ends.consumer->endpoint.poll(sent);
  std::uint64_t taken = 0;
  for (const ring::Run& run : {runs.first, runs.second}) {
    // Another thread may have failed all that is pending meanwhile.
    for (std::uint64_t i = 0; i < run.slots && !channel.pending.empty(); ++i, ++taken) {
      ReplyObject* reply = channel.pending.front();
      const nb::object keep = nb::borrow(reinterpret_cast<PyObject*>(reply));
      channel.pending.pop_front();
      ends.consumer->awaited = channel.pending.size();
      caller.finished.push_back(reply);
      if (!reply->done) {
        finish_one(ends, run.lines + i * ends.consumer->endpoint.geometry().slot_lines, reply);
      }
    }
  }
  if (runs.size() == 0) {
    require_sound(*ends.consumer, bad_line);
    return false;
  }
  ends.consumer->endpoint.release(taken);
  send_waiting(channel);
  return true;
}

// Everybody who waits gets the Python error in flight.
void fail_pending(AsyncCaller& caller) {
  const nb::object error = nb::steal(take_error());
  for (const auto& channel : caller.channels) {
    // Replies of what was sent may still come; nobody waits for them any more.
    channel->ends.consumer->abandoned += channel->pending.size() - channel->waiting.size();
    channel->waiting.clear();
    channel->ends.producer->queued = 0;
    std::deque<ReplyObject*> pending;
    pending.swap(channel->pending);
    channel->ends.consumer->awaited = 0;
    for (ReplyObject* reply : pending) {
      settle_reply(reply, Py_NewRef(error.ptr()), true);
      caller.finished.push_back(reply);
    }
  }
}

void run_finished(AsyncCaller& caller) {
  std::vector<ReplyObject*> batch;
  batch.swap(caller.finished);
  for (ReplyObject* reply : batch) {
    run_callbacks(reply);
    Py_DECREF(reply);
  }
  batch.clear();
  if (caller.finished.empty()) caller.finished.swap(batch);  // keeps its memory
}

void take_and_run(AsyncCaller& caller) {
  for (int round = 0; round < max_rounds; ++round) {
    bool any = false;
    for (const auto& channel : caller.channels) any |= take_replies(caller, *channel);
    run_finished(caller);
    if (!any) break;
  }
}

// The event loop's reader of the eventfd. A loop that lost the caller to another may still call.
PyObject* drain(PyObject* object, PyObject*) {
  const nb::ft_object_guard alone(object);
  AsyncCaller& caller = caller_of(object);
  const nb::object running = nb::steal(PyObject_CallNoArgs(caller.running_loop));
  if (!running.is_valid()) return nullptr;
  if (caller.draining || caller.loop != running.ptr()) Py_RETURN_NONE;
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(caller.fd, &count, sizeof count);
  caller.armed = false;
  caller.draining = true;
  try {
    try {
      take_and_run(caller);
      bool ended = false;
      for (const auto& channel : caller.channels) {
        ended |= !channel->pending.empty() && channel->ends.consumer->endpoint.producer_closed();
      }
      if (ended) caller.check();
    } catch (...) {
      set_ring_error();
      fail_pending(caller);
      run_finished(caller);
    }
    caller.draining = false;
    arm(caller);
  } catch (...) {
    caller.draining = false;
    set_ring_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

const std::byte* record_of(CallChannel& ends, PyObject* message, Records* slow) {
  if (const std::byte* record = ends.message.bytes_of(message); record != nullptr) return record;
  *slow = records_of(message, ends.message.dtype());
  if (slow->size != 1) throw InvalidValue("a call takes one message; send() takes batches");
  return slow->data;
}

AsyncChannel& channel_of(AsyncCaller& caller, PyObject* const* args, Py_ssize_t nargs,
                         PyObject* kwnames) {
  const Py_ssize_t keywords = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  if (nargs != 1 || keywords > 1 ||
      (keywords == 1 && PyUnicode_Compare(PyTuple_GET_ITEM(kwnames, 0), name_ring) != 0)) {
    PyErr_SetString(PyExc_TypeError, "call(message, *, ring=0)");
    throw nb::python_error();
  }
  const Py_ssize_t ring = keywords == 1 ? PyNumber_AsSsize_t(args[1], nullptr) : 0;
  if (ring == -1 && PyErr_Occurred()) throw nb::python_error();
  if (ring < 0 || static_cast<std::size_t>(ring) >= caller.channels.size()) {
    throw InvalidValue("ring=" + std::to_string(ring) + " must be 0 to " +
                       std::to_string(caller.channels.size() - 1));
  }
  return *caller.channels[static_cast<std::size_t>(ring)];
}

// The loop that runs, which is the one whose eventfd the poller writes to.
nb::object require_loop(AsyncCaller& caller) {
  nb::object running = nb::steal(PyObject_CallNoArgs(caller.running_loop));
  if (!running.is_valid()) throw nb::python_error();
  if (running.ptr() == caller.loop) [[likely]] return running;
  caller.bind();
  if (caller.loop == nullptr) throw Closed("no event loop is bound");
  return running;
}

void send(AsyncChannel& channel, const std::byte* record) {
  CallChannel& ends = channel.ends;
  const Use<ring::Producer> sending(*ends.producer);
  auto& producer = ends.producer->endpoint;
  const std::uint64_t mine = channel.pending.size() - channel.waiting.size();
  if (ends.unread() != mine || producer.reserved() != 0) [[unlikely]] {
    throw InvalidValue("replies of messages that were sent on this ring are unread, or slots of it "
                       "reserved; recv() and commit() first, or call on another ring");
  }
  if (channel.waiting.empty() && producer.send(record, 1) == 1) [[likely]] return;
  require_sound(*ends.producer, bad_head);
  if (ends.consumer->closed.load()) throw Closed("the endpoint is closed");
  channel.waiting.emplace_back(record, record + ends.message.nbytes());
  ends.producer->queued = channel.waiting.size();
}

// Sends, and waits for the reply. No Python runs meanwhile: the message and its reply take the same
// place in both lines. While a call waits nobody else may read replies, so that only the first one
// has to look whether somebody does.
void post(AsyncChannel& channel, const std::byte* record, PyObject* reply) {
  NativeConsumer& consumer = *channel.ends.consumer;
  std::optional<Use<ring::Consumer>> alone;
  if (channel.pending.empty()) {
    if (consumer.busy.load(std::memory_order_relaxed)) {
      throw InUse("another thread reads replies of this ring, and would take this one; await calls "
                  "on another ring, or after it");
    }
    alone.emplace(consumer);
  }
  send(channel, record);
  channel.pending.push_back(reinterpret_cast<ReplyObject*>(Py_NewRef(reply)));
  consumer.awaited = channel.pending.size();
}

PyObject* vectorcall(PyObject* object, PyObject* const* args, std::size_t flags, PyObject* kwnames) {
  const nb::ft_object_guard alone(object);
  AsyncCaller& caller = caller_of(object);
  try {
    AsyncChannel& channel = channel_of(caller, args, PyVectorcall_NARGS(flags), kwnames);
    const nb::object loop = require_loop(caller);
    if (!caller.checking) {
      caller.check();
      caller.checking = caller.loop == loop.ptr();
    }
    Records slow;
    const std::byte* record = record_of(channel.ends, args[0], &slow);
    ReplyObject* reply = new_reply(loop.ptr());
    if (reply == nullptr) return nullptr;
    nb::object result = nb::steal(reinterpret_cast<PyObject*>(reply));
    if (caller.loop != loop.ptr()) throw InUse("calls wait in another event loop meanwhile");
    post(channel, record, result.ptr());
    arm(caller);
    return result.release().ptr();
  } catch (...) {
    set_ring_error();
    return nullptr;
  }
}

// attach(loop, fd): calls wait in `loop` from now on; None, -1: in none.
PyObject* attach(PyObject* object, PyObject* args) {
  const nb::ft_object_guard alone(object);
  AsyncCaller& caller = caller_of(object);
  PyObject* loop = nullptr;
  int fd = -1;
  if (!PyArg_ParseTuple(args, "Oi", &loop, &fd)) return nullptr;
  try {
    if (caller.watch != 0 && caller.generation == fork_generation()) {
      ring::Poller::instance().unwatch(caller.watch);
    }
    caller.watch = 0;
    caller.armed = false;
    Py_CLEAR(caller.loop);
    if (loop == Py_None) Py_RETURN_NONE;
    caller.watch = ring::Poller::instance().watch(fd);
    caller.fd = fd;
    Py_XSETREF(caller.loop, Py_NewRef(loop));
  } catch (...) {
    set_ring_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

// let_go(): leaves its loop if nobody waits there; else False.
PyObject* let_go(PyObject* object, PyObject*) {
  const nb::ft_object_guard alone(object);
  AsyncCaller& caller = caller_of(object);
  bool busy = caller.draining;  // in the thread of that loop: what is pending now is no end of it
  for (const auto& channel : caller.channels) busy |= !channel->pending.empty();
  if (!busy) Py_CLEAR(caller.loop);
  return PyBool_FromLong(!busy);
}

PyObject* pending(PyObject* object, PyObject*) {
  const nb::ft_object_guard alone(object);
  std::size_t count = 0;
  for (const auto& channel : caller_of(object).channels) count += channel->pending.size();
  return PyLong_FromSize_t(count);
}

// checked(on): whether somebody looks at the kernel from time to time.
PyObject* checked(PyObject* object, PyObject* on) {
  const nb::ft_object_guard alone(object);
  caller_of(object).checking = on == Py_True;
  Py_RETURN_NONE;
}

// fail(error): everybody who waits gets it.
PyObject* fail(PyObject* object, PyObject* error) {
  const nb::ft_object_guard alone(object);
  AsyncCaller& caller = caller_of(object);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  fail_pending(caller);
  std::vector<ReplyObject*> batch;
  batch.swap(caller.finished);
  for (ReplyObject* reply : batch) {
    schedule_callbacks(reply);
    Py_DECREF(reply);
  }
  Py_RETURN_NONE;
}

void dealloc(PyObject* object) {
  AsyncCaller* caller = reinterpret_cast<CallerObject*>(object)->caller;
  if (caller->watch != 0 && caller->generation == fork_generation()) {
    ring::Poller::instance().unwatch(caller->watch);
  }
  for (const auto& channel : caller->channels) {
    for (ReplyObject* reply : channel->pending) Py_DECREF(reply);
  }
  Py_XDECREF(caller->loop);
  Py_DECREF(caller->running_loop);
  delete caller;
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"attach", attach, METH_VARARGS, "attach(loop, fd)\n--\n\nWait in this event loop from now on."},
    {"let_go", let_go, METH_NOARGS, "let_go()\n--\n\nLeave the loop, unless calls wait there."},
    {"drain", drain, METH_NOARGS, "drain()\n--\n\nComplete the calls whose replies are there."},
    {"pending", pending, METH_NOARGS, "pending()\n--\n\nCalls that wait."},
    {"checked", checked, METH_O, "checked(on)\n--\n\nWhether somebody looks for failures."},
    {"fail", fail, METH_O, "fail(error)\n--\n\nGive an error to every call that waits."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallerObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Sends one message; the reply is awaited.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {
    "ringmem.native._native.AsyncRingCaller", sizeof(CallerObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_VECTORCALL, slots};

PyTypeObject* caller_type = nullptr;

nb::object make_async_caller(nb::list producers, nb::list consumers, nb::object bind,
                             nb::object check) {
  auto caller = std::make_unique<AsyncCaller>();
  for (std::size_t i = 0; i < producers.size(); ++i) {
    caller->channels.push_back(std::make_unique<AsyncChannel>(producers[i], consumers[i]));
  }
  caller->bind = std::move(bind);
  caller->check = std::move(check);
  caller->running_loop =
      nb::object(nb::module_::import_("asyncio").attr("_get_running_loop")).release().ptr();
  auto* object = PyObject_New(CallerObject, caller_type);
  if (object == nullptr) throw nb::python_error();
  object->vectorcall = vectorcall;
  object->caller = caller.release();
  return nb::steal(reinterpret_cast<PyObject*>(object));
}

}  // namespace

void bind_ring_aio(nb::module_& m) {
  init_reply_type(m);
  name_ring = PyUnicode_InternFromString("ring");
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) nb::raise_python_error();
  caller_type = reinterpret_cast<PyTypeObject*>(type);
  m.attr("AsyncRingCaller") = nb::steal(type);
  m.def("make_async_caller", &make_async_caller, nb::arg("producers"), nb::arg("consumers"),
        nb::arg("bind"), nb::arg("check"));
}

}  // namespace ringmem::bind
