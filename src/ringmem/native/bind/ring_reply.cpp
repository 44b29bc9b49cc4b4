#include "bind/ring_aio.hpp"

#include <structmember.h>

#include <atomic>
#include <utility>

namespace ringmem::bind {
namespace {

PyTypeObject* reply_type = nullptr;
PyObject *name_call_soon, *name_context;
std::atomic<PyObject*> cancelled_error, invalid_state_error;  // asyncio's; set once, never freed

ReplyObject* self_of(PyObject* object) noexcept { return reinterpret_cast<ReplyObject*>(object); }

int traverse(PyObject* object, visitproc visit, void* arg) {
  ReplyObject* self = self_of(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->loop);
  Py_VISIT(self->result);
  Py_VISIT(self->callback);
  Py_VISIT(self->context);
  Py_VISIT(self->more);
  return 0;
}

int clear(PyObject* object) {
  ReplyObject* self = self_of(object);
  Py_CLEAR(self->loop);
  Py_CLEAR(self->result);
  Py_CLEAR(self->callback);
  Py_CLEAR(self->context);
  Py_CLEAR(self->more);
  return 0;
}

void dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

// The outcome as a new reference, or null with it raised. With the object's lock held.
PyObject* outcome(ReplyObject* self) {
  if (self->cancelled) {
    PyErr_SetNone(cancelled_error.load());
    return nullptr;
  }
  if (!self->done) {
    PyErr_SetString(invalid_state_error.load(), "the reply is not there yet");
    return nullptr;
  }
  if (self->failed) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(self->result)), self->result);
    return nullptr;
  }
  return Py_NewRef(self->result);
}

PyObject* self_iter(PyObject* object) { return Py_NewRef(object); }

// Yields itself until done: that is how a task learns what to wait for.
PySendResult am_send(PyObject* object, PyObject*, PyObject** result) {
  const nb::ft_object_guard alone(object);
  ReplyObject* self = self_of(object);
  if (!self->done) {
    self->blocking = true;
    *result = Py_NewRef(object);
    return PYGEN_NEXT;
  }
  *result = outcome(self);
  return *result != nullptr ? PYGEN_RETURN : PYGEN_ERROR;
}

PyObject* iternext(PyObject* object) {
  PyObject* result = nullptr;
  if (am_send(object, Py_None, &result) == PYGEN_NEXT) return result;
  if (result == nullptr) return nullptr;
  PyObject* stop = PyObject_CallOneArg(PyExc_StopIteration, result);
  Py_DECREF(result);
  if (stop != nullptr) {
    PyErr_SetObject(PyExc_StopIteration, stop);
    Py_DECREF(stop);
  }
  return nullptr;
}

PyObject* send(PyObject* object, PyObject*) { return iternext(object); }

PyObject* throw_in(PyObject*, PyObject* args) {
  PyObject* type = PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0) : Py_None;
  PyObject* value = PyTuple_GET_SIZE(args) > 1 ? PyTuple_GET_ITEM(args, 1) : nullptr;
  if (PyExceptionInstance_Check(type)) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(type)), type);
  } else {
    PyErr_SetObject(type, value == Py_None ? nullptr : value);
  }
  return nullptr;
}

PyObject* close(PyObject*, PyObject*) { Py_RETURN_NONE; }

// Through the loop's queue: for callbacks that come after the reply, and for cancellation.
bool call_soon(ReplyObject* self, PyObject* callback, PyObject* context) {
  PyObject* args[] = {self->loop, callback, reinterpret_cast<PyObject*>(self), context};
  PyObject* names = context != nullptr ? PyTuple_Pack(1, name_context) : nullptr;
  PyObject* handle = PyObject_VectorcallMethod(name_call_soon, args, 3, names);
  Py_XDECREF(names);
  Py_XDECREF(handle);
  return handle != nullptr;
}

enum class Added { yes, no, too_late, failed };

Added add_first(ReplyObject* self, PyObject* callback, PyObject* context) {
  const nb::ft_object_guard alone(reinterpret_cast<PyObject*>(self));
  if (self->done) return Added::too_late;
  if (self->callback != nullptr) return Added::no;
  self->callback = Py_NewRef(callback);
  self->context = Py_XNewRef(context);
  return Added::yes;
}

Added add_more(ReplyObject* self, PyObject* both, nb::object& list) {
  const nb::ft_object_guard alone(reinterpret_cast<PyObject*>(self));
  if (self->done) return Added::too_late;
  if (self->more == nullptr) self->more = list.release().ptr();
  return PyList_Append(self->more, both) == 0 ? Added::yes : Added::failed;
}

PyObject* add_done_callback(PyObject* object, PyObject* const* args, Py_ssize_t nargs,
                            PyObject* kwnames) {
  ReplyObject* self = self_of(object);
  const Py_ssize_t keywords = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  const bool named = keywords == 0 ||
                     PyUnicode_Compare(PyTuple_GET_ITEM(kwnames, 0), name_context) == 0;
  if (nargs != 1 || keywords > 1 || !named) {
    PyErr_SetString(PyExc_TypeError, "add_done_callback(callback, *, context=None)");
    return nullptr;
  }
  PyObject* context = keywords == 1 && args[1] != Py_None ? args[1] : nullptr;
  Added added = add_first(self, args[0], context);
  if (added == Added::no) {
    // What may collect garbage, and so let others in, comes before the lock.
    const nb::object both = nb::steal(PyTuple_Pack(2, args[0], context ? context : Py_None));
    nb::object list = nb::steal(PyList_New(0));
    if (!both.is_valid() || !list.is_valid()) return nullptr;
    added = add_more(self, both.ptr(), list);
  }
  if (added == Added::failed) return nullptr;
  if (added == Added::too_late && !call_soon(self, args[0], context)) return nullptr;
  Py_RETURN_NONE;
}

// Takes the first callback off, if it still is this one; returns how many that were.
long drop_first(ReplyObject* self, const nb::object& callback) {
  nb::object dropped, context;  // let go of without the lock
  const nb::ft_object_guard alone(reinterpret_cast<PyObject*>(self));
  if (self->callback != callback.ptr()) return 0;
  dropped = nb::steal(std::exchange(self->callback, nullptr));
  context = nb::steal(std::exchange(self->context, nullptr));
  return 1;
}

PyObject* remove_done_callback(PyObject* object, PyObject* callback) {
  ReplyObject* self = self_of(object);
  nb::object first, more;  // comparing runs Python: what it may change is held here
  {
    const nb::ft_object_guard alone(object);
    first = nb::borrow(self->callback);
    more = nb::borrow(self->more);
  }
  long removed = 0;
  if (first.is_valid()) {
    const int same = PyObject_RichCompareBool(first.ptr(), callback, Py_EQ);
    if (same < 0) return nullptr;
    if (same == 1) removed += drop_first(self, first);
  }
  for (Py_ssize_t i = more.is_valid() ? PyList_GET_SIZE(more.ptr()) : 0; i-- > 0;) {
    const nb::object both = nb::steal(PySequence_GetItem(more.ptr(), i));
    if (!both.is_valid()) return nullptr;
    const int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(both.ptr(), 0), callback, Py_EQ);
    if (same < 0 || (same == 1 && PySequence_DelItem(more.ptr(), i) != 0)) return nullptr;
    removed += same;
  }
  return PyLong_FromLong(removed);
}

// Who waits for a reply, taken from it: nobody else calls them.
struct Waiters {
  explicit Waiters(ReplyObject* self) {
    const nb::ft_object_guard alone(reinterpret_cast<PyObject*>(self));
    callback = nb::steal(std::exchange(self->callback, nullptr));
    context = nb::steal(std::exchange(self->context, nullptr));
    more = nb::steal(std::exchange(self->more, nullptr));
  }

  // Calls `each(callback, context)`, context null for none, until one answers false.
  template <class Each>
  bool all(Each each) const {
    if (callback.is_valid() && !each(callback.ptr(), context.ptr())) return false;
    for (Py_ssize_t i = 0; more.is_valid() && i < PyList_GET_SIZE(more.ptr()); ++i) {
      const nb::object both = nb::borrow(PyList_GET_ITEM(more.ptr(), i));
      PyObject* other = PyTuple_GET_ITEM(both.ptr(), 1);
      if (!each(PyTuple_GET_ITEM(both.ptr(), 0), other != Py_None ? other : nullptr)) return false;
    }
    return true;
  }

  nb::object callback, context, more;
};

// All callbacks through the loop's queue; false with a Python error set.
bool call_all_soon(ReplyObject* self) {
  return Waiters(self).all([self](PyObject* callback, PyObject* context) {
    return call_soon(self, callback, context);
  });
}

PyObject* cancel(PyObject* object, PyObject*, PyObject*) {
  ReplyObject* self = self_of(object);
  {
    const nb::ft_object_guard alone(object);
    if (self->done) Py_RETURN_FALSE;
    self->done = self->cancelled = true;
  }
  if (!call_all_soon(self)) return nullptr;
  Py_RETURN_TRUE;
}

PyObject* result(PyObject* object, PyObject*) {
  const nb::ft_object_guard alone(object);
  return outcome(self_of(object));
}

PyObject* exception(PyObject* object, PyObject*) {
  const nb::ft_object_guard alone(object);
  ReplyObject* self = self_of(object);
  if (self->done && !self->cancelled) return Py_NewRef(self->failed ? self->result : Py_None);
  return outcome(self);
}

PyObject* done(PyObject* object, PyObject*) {
  const nb::ft_object_guard alone(object);
  return PyBool_FromLong(self_of(object)->done);
}
PyObject* cancelled(PyObject* object, PyObject*) {
  const nb::ft_object_guard alone(object);
  return PyBool_FromLong(self_of(object)->cancelled);
}
// What gather() asks a cancelled future for.
PyObject* make_cancelled_error(PyObject*, PyObject*) {
  return PyObject_CallNoArgs(cancelled_error.load());
}
PyObject* get_loop(PyObject* object, PyObject*) { return Py_NewRef(self_of(object)->loop); }

PyObject* get_blocking(PyObject* object, void*) {
  const nb::ft_object_guard alone(object);
  return PyBool_FromLong(self_of(object)->blocking);
}
int set_blocking(PyObject* object, PyObject* value, void*) {
  const int truth = value != nullptr ? PyObject_IsTrue(value) : 0;
  if (truth < 0) return -1;
  const nb::ft_object_guard alone(object);
  self_of(object)->blocking = truth == 1;
  return 0;
}

PyObject* no_message(PyObject*, void*) { Py_RETURN_NONE; }  // cancel() keeps none

template <class Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

// With send(), throw() and close() it passes for a coroutine too, which create_task() wants and task
// groups take alone; the price is that asyncio.wait() refuses it, as it does coroutines.
PyMethodDef methods[] = {
    {"add_done_callback", method(add_done_callback), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"remove_done_callback", remove_done_callback, METH_O, nullptr},
    {"cancel", method(cancel), METH_VARARGS | METH_KEYWORDS,
     "cancel()\n--\n\nGive up waiting; the reply is dropped when it comes."},
    {"cancelled", cancelled, METH_NOARGS, nullptr},
    {"_make_cancelled_error", make_cancelled_error, METH_NOARGS, nullptr},
    {"done", done, METH_NOARGS, nullptr},
    {"result", result, METH_NOARGS, nullptr},
    {"exception", exception, METH_NOARGS, nullptr},
    {"get_loop", get_loop, METH_NOARGS, nullptr},
    {"send", send, METH_O, nullptr},
    {"throw", throw_in, METH_VARARGS, nullptr},
    {"close", close, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"_asyncio_future_blocking", get_blocking, set_blocking, nullptr, nullptr},
    {"_cancel_message", no_message, nullptr, nullptr, nullptr},  // gather() asks for it
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("The reply to come of one message; await it.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_iter, reinterpret_cast<void*>(self_iter)},
    {Py_tp_iternext, reinterpret_cast<void*>(iternext)},
    {Py_am_await, reinterpret_cast<void*>(self_iter)},
    {Py_am_send, reinterpret_cast<void*>(am_send)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"ringmem.native._native.RingReply", sizeof(ReplyObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                    slots};

void run(PyObject* callback, PyObject* context, PyObject* reply) noexcept {
  if (context != nullptr && PyContext_Enter(context) != 0) {
    PyErr_WriteUnraisable(callback);
    return;
  }
  PyObject* returned = or_park([&] { return PyObject_CallOneArg(callback, reply); });
  if (returned == nullptr) PyErr_WriteUnraisable(callback);
  Py_XDECREF(returned);
  if (context != nullptr && PyContext_Exit(context) != 0) PyErr_WriteUnraisable(callback);
}

}  // namespace

ReplyObject* new_reply(PyObject* loop) noexcept {
  ReplyObject* self = PyObject_GC_New(ReplyObject, reply_type);
  if (self == nullptr) return nullptr;
  self->loop = Py_NewRef(loop);
  self->result = self->callback = self->context = self->more = nullptr;
  self->done = self->failed = self->cancelled = self->blocking = false;
  PyObject_GC_Track(self);
  return self;
}

void settle_reply(ReplyObject* reply, PyObject* outcome_of, bool failed) noexcept {
  nb::object unwanted = nb::steal(outcome_of);  // let go of without the lock
  const nb::ft_object_guard alone(reinterpret_cast<PyObject*>(reply));
  if (reply->done) return;
  reply->result = unwanted.release().ptr();
  reply->failed = failed;
  reply->done = true;
}

void run_callbacks(ReplyObject* reply) noexcept {
  Waiters(reply).all([reply](PyObject* callback, PyObject* context) {
    run(callback, context, reinterpret_cast<PyObject*>(reply));
    return true;
  });
}

void schedule_callbacks(ReplyObject* reply) noexcept {
  if (!call_all_soon(reply)) PyErr_Clear();  // the loop is closed: nobody is there to be told
}

void init_reply_type(nb::module_& m) {
  name_call_soon = PyUnicode_InternFromString("call_soon");
  name_context = PyUnicode_InternFromString("context");
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) nb::raise_python_error();
  reply_type = reinterpret_cast<PyTypeObject*>(type);
  m.attr("RingReply") = nb::steal(type);
  m.def("set_asyncio_errors", [](nb::object cancelled_class, nb::object invalid_state_class) {
    PyObject* none = nullptr;
    if (!cancelled_error.compare_exchange_strong(none, cancelled_class.ptr())) return;
    cancelled_class.release();
    invalid_state_error.store(invalid_state_class.release().ptr());
  });
}

}  // namespace ringmem::bind
