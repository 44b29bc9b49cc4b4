// One awaited reply: what asyncio's tasks accept as a future, without a Python frame and without a
// trip through the loop's queue for each message. It belongs to the loop's thread, as futures do;
// what other threads do to it is done under the object's lock (nothing with a GIL), so that it may
// be wrong but breaks nothing.
#pragma once

#include "bind/objects.hpp"

namespace ringmem::bind {

struct ReplyObject {
  PyObject_HEAD
  PyObject* loop;
  PyObject* result;     // once done: the reply, or the exception
  PyObject* callback;   // the first; a task has no other
  PyObject* context;    // of it; null: none
  PyObject* more;       // list of (callback, context) beyond the first
  bool done, failed, cancelled, blocking;
};

void init_reply_type(nb::module_& m);

// A pending reply of `loop`; null with a Python error set.
ReplyObject* new_reply(PyObject* loop) noexcept;

// Sets the outcome, unless it was cancelled. Steals `result`.
void settle_reply(ReplyObject* reply, PyObject* result, bool failed) noexcept;

// Calls what waits for a reply that is done, each in its context, here and now. To be called by the
// event loop's thread, outside any task. Python errors go to sys.unraisablehook.
void run_callbacks(ReplyObject* reply) noexcept;
// The same in their turn of the loop, from anywhere in its thread.
void schedule_callbacks(ReplyObject* reply) noexcept;

}  // namespace ringmem::bind
