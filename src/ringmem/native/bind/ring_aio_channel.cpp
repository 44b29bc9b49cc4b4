#include "bind/ring_aio_channel.hpp"

#include <optional>
#include <string>
#include <utility>

namespace ringmem::bind {

PyObject* take_error() noexcept {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value;
}

AsyncChannel::~AsyncChannel() {
  for (ReplyObject* reply : pending_) Py_DECREF(reply);
}

// --- sending -----------------------------------------------------------------------------------------
const std::byte* AsyncChannel::record_of(PyObject* message, Records* slow) {
  if (const std::byte* record = ends_.message.bytes_of(message); record != nullptr) return record;
  *slow = records_of(message, ends_.message.dtype());
  if (slow->size != 1) throw InvalidValue("a call takes one message; send() takes batches");
  return slow->data;
}

// While a call waits nobody else may read replies, so that only the first one has to look whether
// somebody does.
void AsyncChannel::post(const std::byte* record, ReplyObject* reply) {
  NativeConsumer& consumer = *ends_.consumer;
  std::optional<Use<ring::Consumer>> alone;
  if (pending_.empty()) {
    if (consumer.busy.load(std::memory_order_relaxed)) {
      throw InUse("another thread reads replies of this ring, and would take this one; await calls "
                  "on another ring, or after it");
    }
    alone.emplace(consumer);
  }
  send(record);
  pending_.push_back(reinterpret_cast<ReplyObject*>(Py_NewRef(reply)));
  consumer.awaited = pending_.size();
}

void AsyncChannel::send(const std::byte* record) {
  const Use<ring::Producer> sending(*ends_.producer);
  auto& producer = ends_.producer->endpoint;
  require_takes_calls(*ends_.producer);
  if (ends_.unread() != sent() || producer.reserved() != 0) [[unlikely]] {
    throw InvalidValue("replies of messages that were sent on this ring are unread, or slots of it "
                       "reserved; recv() and commit() first, or call on another ring");
  }
  if (waiting_.empty() && producer.send(record, 1) == 1) [[likely]] return;
  require_sound(*ends_.producer, bad_head);
  if (ends_.consumer->closed.load()) throw Closed("the endpoint is closed");
  waiting_.emplace_back(record, record + ends_.message.nbytes());
  ends_.producer->queued = waiting_.size();
}

// Where another thread holds the producer, to be refused, the poller comes again. A kernel that was
// told to end might leave for its next run what came now.
void AsyncChannel::send_waiting() {
  if (waiting_.empty() || !ends_.producer->takes_calls.load()) return;
  NativeProducer& producer = *ends_.producer;
  if (producer.busy.exchange(true, std::memory_order_acquire)) return;
  while (!waiting_.empty() && producer.endpoint.send(waiting_.front().data(), 1) == 1) {
    waiting_.pop_front();
  }
  producer.queued = waiting_.size();
  producer.busy.store(false, std::memory_order_release);
}

// --- replies -----------------------------------------------------------------------------------------
bool AsyncChannel::take_replies(Replies& finished) {
  if (pending_.empty()) return false;  // others may use this ring
  std::optional<Use<ring::Consumer>> receiving;
  try {
    receiving.emplace(*ends_.consumer);
  } catch (const InUse&) {
    return false;  // by a reader that is about to be refused: the poller comes again
  }
  auto& consumer = ends_.consumer->endpoint;
  const bool settled = settle(*ends_.consumer);
  send_waiting();
  if (!settled || sent() == 0) return false;
  const ring::Runs runs = consumer.poll(sent());
  if (runs.size() == 0) {
    require_sound(*ends_.consumer, bad_line);
    return false;
  }
  std::uint64_t taken = 0;
  for (const ring::Run& run : {runs.first, runs.second}) {
    // Another thread may have failed all that is pending meanwhile.
    for (std::uint64_t i = 0; i < run.slots && !pending_.empty(); ++i, ++taken) {
      ReplyObject* reply = pending_.front();
      const nb::object keep = nb::borrow(reinterpret_cast<PyObject*>(reply));
      pending_.pop_front();
      ends_.consumer->awaited = pending_.size();
      finished.push_back(reply);
      if (!reply->done) finish(run.lines + i * consumer.geometry().slot_lines, reply);
    }
  }
  consumer.release(taken);
  send_waiting();
  return true;
}

// What the slot holds is the outcome of the call, or the error that keeps it from being made.
void AsyncChannel::finish(const layout::Line* slot, ReplyObject* reply) try {
  const void* data = slot->payload;
  if (ends_.reply.nbytes() > layout::line_payload_nbytes) {
    ring::unpack(ends_.scratch.data(), slot, ends_.reply.nbytes());
    data = ends_.scratch.data();
  }
  nb::object outcome = nb::steal(ends_.reply.make(data));
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

void AsyncChannel::fail(nb::handle error, Replies& finished) {
  // What waits for room is the newest, and is not sent any more.
  const auto first = pending_.end() - static_cast<std::ptrdiff_t>(waiting_.size());
  std::deque<ReplyObject*> failed(first, pending_.end());
  pending_.erase(first, pending_.end());
  waiting_.clear();
  ends_.producer->queued = 0;
  try {
    while (take_replies(finished)) {
    }
  } catch (...) {  // then nothing can be taken: a closed end, a damaged ring
  }
  // Replies of the rest may still come; nobody waits for them any more.
  ends_.consumer->abandoned += pending_.size();
  failed.insert(failed.begin(), pending_.begin(), pending_.end());
  pending_.clear();
  ends_.consumer->awaited = 0;
  for (ReplyObject* reply : failed) {
    settle_reply(reply, Py_NewRef(error.ptr()), true);
    finished.push_back(reply);
  }
}

}  // namespace ringmem::bind
