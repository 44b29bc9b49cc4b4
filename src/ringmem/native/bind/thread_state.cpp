#include "bind/thread_state.hpp"

namespace ringmem::bind {
namespace {

constexpr const char* key = "ringmem.thread_state";

// Runs with the GIL: on the thread as it ends, or on another one when the interpreter ends.
void destroy(PyObject* capsule) {
  auto* state = static_cast<ThreadState*>(PyCapsule_GetPointer(capsule, key));
  if (thread_state == state) thread_state = nullptr;
  delete state;
}

}  // namespace

ThreadState& make_thread_state() {
  if (thread_state) return *thread_state;
  PyObject* dictionary = PyThreadState_GetDict();
  if (!dictionary) throw std::bad_alloc();
  auto state = std::make_unique<ThreadState>();
  nb::object capsule = nb::steal(PyCapsule_New(state.get(), key, destroy));
  if (!capsule.is_valid()) throw nb::python_error();
  ThreadState* owned = state.release();
  if (PyDict_SetItemString(dictionary, key, capsule.ptr()) != 0) throw nb::python_error();
  return *(thread_state = owned);
}

}  // namespace ringmem::bind
