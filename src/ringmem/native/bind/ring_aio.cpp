// `await kernel.aio.call(message)`: sends at once, and completes whole batches of replies for each
// time that the event loop wakes. Belongs to the thread of one event loop at a time; every entry
// from Python holds the object (nothing with a GIL). Neither that nor the GIL is held through a call
// of Python, so nothing here relies on a state from before one.
#include "bind/ring_aio_channel.hpp"

#include <structmember.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "driver/fork.hpp"
#include "ring/poller.hpp"

namespace ringmem::bind {
namespace {

// Rounds of taking replies in a row before other work of the loop has its turn.
constexpr int max_rounds = 16;

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
  Replies finished;  // scratch of drain()
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
    if (channel->pending() != 0) readers.push_back(channel->reader());
    if (channel->waits_for_room()) writers.push_back(channel->writer());
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

// Everybody who waits gets the Python error in flight.
void fail_pending(AsyncCaller& caller) {
  const nb::object error = nb::steal(take_error());
  for (const auto& channel : caller.channels) channel->fail(error, caller.finished);
}

void run_finished(AsyncCaller& caller) {
  Replies batch;
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
    for (const auto& channel : caller.channels) {
      any |= channel->take_replies(caller.finished);
    }
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
      for (const auto& channel : caller.channels) ended |= channel->at_its_end();
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

AsyncChannel& channel_of(AsyncCaller& caller, PyObject* const* args, Py_ssize_t nargs,
                         PyObject* kwnames) {
  const Py_ssize_t keywords = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  if (nargs != 1 || keywords > 1 ||
      (keywords == 1 && PyUnicode_Compare(PyTuple_GET_ITEM(kwnames, 0), name_ring) != 0)) {
    PyErr_SetString(PyExc_TypeError, "call(message, *, ring=0)");
    throw nb::python_error();
  }
  return *caller.channels[keywords == 1 ? ring_index(args[1], caller.channels.size()) : 0];
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
    const std::byte* record = channel.record_of(args[0], &slow);
    ReplyObject* reply = new_reply(loop.ptr());
    if (reply == nullptr) return nullptr;
    nb::object result = nb::steal(reinterpret_cast<PyObject*>(reply));
    if (caller.loop != loop.ptr()) throw InUse("calls wait in another event loop meanwhile");
    const auto looked_for = [&] { return std::pair(channel.pending() != 0, channel.waits_for_room()); };
    const auto before = looked_for();
    channel.post(record, reply);
    if (looked_for() != before) caller.armed = false;  // the poller does not look there yet
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
  for (const auto& channel : caller.channels) busy |= channel->pending() != 0;
  if (!busy) Py_CLEAR(caller.loop);
  return PyBool_FromLong(!busy);
}

PyObject* pending(PyObject* object, PyObject*) {
  const nb::ft_object_guard alone(object);
  std::size_t count = 0;
  for (const auto& channel : caller_of(object).channels) count += channel->pending();
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
  Replies batch;
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
