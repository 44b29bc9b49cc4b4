#include "ring/cpu_loop.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>

namespace ringmem::ring {
namespace {

constexpr u64 batch = 64;                        // messages between two looks at the control block
constexpr u64 telemetry_interval_ns = 20'000;
// A line of a reply: up to here replies may wait for their run. What ordinary stores take where cores
// are far apart is below it.
constexpr u64 fast_line_ns = 300;
constexpr std::chrono::microseconds pause_nap{20};
// A gap between two looks counts as so small a part of the heartbeat's timeout at most: this process
// may have been stopped, and with it whoever beats the heart.
constexpr u64 gaps_in_timeout = 16;

u64 now_ns() noexcept {
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::steady_clock::now().time_since_epoch())
                              .count());
}

// Rings of a kernel are header and slots in one piece, made by the host beside it.
RingView view_at(layout::RingHeader* header) {
  return attach(header, std::numeric_limits<std::size_t>::max());
}

}  // namespace

CpuLoop::CpuLoop(const KernelPair& pair, CpuHandler handler, State state,
                 const std::atomic<bool>& fault, u64 deadline_ns)
    : pair_(pair),
      input_(view_at(pair.input)),
      output_(view_at(pair.output)),
      dead_letter_(pair.dead_letter != nullptr ? view_at(pair.dead_letter) : RingView{}),
      handler_(handler),
      state_(state),
      fault_(&fault),
      deadline_ns_(deadline_ns),
      message_(input_.view.geometry.slot_lines + 1),
      reply_(output_.view.geometry.slot_lines + 1),
      next_(load(pair.input->consumer.head)),
      output_head_(load(pair.output->consumer.head)),
      dead_tail_(pair.dead_letter != nullptr ? load(pair.dead_letter->producer.tail) : 0) {
  const u64 slots = slots_in_run(output_.view.geometry.slot_lines);
  if (slots >= least_streamed_slots) run_ = std::min(slots, batch);
  staged_.resize(run_ * output_.view.geometry.slot_lines);
  take_over();
}

// An earlier loop may have been killed between an answer and its index: what is answered stays
// answered, and what was streamed beyond is taken back.
void CpuLoop::take_over() noexcept {
  const u64 capacity = output_.view.geometry.capacity;
  if (next_ - output_head_ > capacity) return;  // damaged: has_room() will say so
  const u64 first = next_;
  while (next_ - output_head_ < capacity && output_.state(next_) == Slots::SlotState::ready) {
    ++next_;
  }
  if (next_ != first) {
    store(pair_.output->producer.tail, next_);
    store(pair_.input->consumer.head, next_);
  }
  output_.retract(next_, std::min(capacity - (next_ - output_head_), streamed_lines));
}

void CpuLoop::run() {
  start_ns_ = looked_ns_ = busy_ns_ = now_ns();
  beat_ = load(pair_.control->heartbeat);
  store(pair_.control->active, u32{1});
  while (reason_ == EndReason::none) {
    const u64 now = now_ns();
    const Order order = look_at_control(now);
    if (order == Order::leave) break;
    set_paused(order == Order::pause);
    if (order == Order::pause) {
      publish(now, true);
      std::this_thread::sleep_for(pause_nap);
      continue;
    }
    if (drained()) break;
    if (handle_ready() != 0) {
      busy_ns_ = now;
      publish(last_ns_, false);
    } else if (reason_ == EndReason::none) {
      publish(now, false);
      wait(now);
    }
  }
  publish(now_ns(), true);
  store(pair_.control->is_paused, u32{0});
  store(pair_.control->end_reason, static_cast<u32>(reason_));
  store(pair_.control->active, u32{0});
  store(pair_.control->has_terminated, u32{1});
}

CpuLoop::Order CpuLoop::look_at_control(u64 now) noexcept {
  const layout::ControlBlock& control = *pair_.control;
  const u64 timeout_ns = u64{load(control.heartbeat_timeout_ms)} * 1'000'000;
  const u64 heartbeat = load(control.heartbeat);
  silent_ns_ = heartbeat != beat_ ? 0
                                  : silent_ns_ + std::min(now - looked_ns_, timeout_ns / gaps_in_timeout);
  beat_ = heartbeat;
  looked_ns_ = now;
  if (load(control.should_terminate) != 0) {
    reason_ = EndReason::terminated;
  } else if ((timeout_ns != 0 && silent_ns_ > timeout_ns) ||
             (deadline_ns_ != 0 && now - start_ns_ > deadline_ns_)) {
    reason_ = EndReason::orphaned;
  }
  if (reason_ != EndReason::none) return Order::leave;
  draining_ = load(control.should_drain) != 0;
  return load(control.should_pause) != 0 ? Order::pause : Order::run;
}

// The tail is read after should_drain was seen, so everything sent before the drain is below it.
bool CpuLoop::drained() noexcept {
  if (!draining_) return false;
  const u64 waiting = load(pair_.input->producer.tail) - next_;
  if (waiting != 0 && waiting <= input_.view.geometry.capacity) return false;
  reason_ = EndReason::drained;
  return true;
}

// Answers the messages that are there, at most `batch`; returns how many.
u64 CpuLoop::handle_ready() {
  if (input_.state(next_) == Slots::SlotState::pending) return 0;
  const u64 seen_ns = now_ns();
  u64 done = 0;
  while (done < batch && take_one()) ++done;
  flush_staged();
  if (done == 0) return 0;
  store(pair_.output->producer.tail, next_);
  store(pair_.input->consumer.head, next_);
  account(done, seen_ns);
  if (!guards_hold()) reason_ = EndReason::faulted;
  return done;
}

bool CpuLoop::guards_hold() const noexcept {
  static const auto whole = [] {
    std::array<std::byte, guard_nbytes> bytes;
    bytes.fill(static_cast<std::byte>(guard_byte));
    return bytes;
  }();
  return std::memcmp(state_.data - guard_nbytes, whole.data(), guard_nbytes) == 0 &&
         std::memcmp(state_.data + state_.nbytes, whole.data(), guard_nbytes) == 0;
}

// Answers message `next_`, if it is there and its answer has room.
bool CpuLoop::take_one() {
  const auto state = input_.state(next_);
  if (state == Slots::SlotState::corrupted) reason_ = EndReason::corrupted;
  if (state != Slots::SlotState::ready || !has_room()) return false;
  const u32 lines = output_.view.geometry.slot_lines;
  Line* to = staging_ ? staged_.data() + staged_slots_ * lines : output_.slot(next_);
  // A reply of one line is made in its place: nobody looks at it before its sequence.
  const i32 status = call(input_.slot(next_), lines == 1 ? static_cast<void*>(to->payload)
                                                         : static_cast<void*>(reply_.data()));
  if (fault_->load(std::memory_order_relaxed)) {
    reason_ = EndReason::faulted;
    return false;
  }
  const u64 word = layout::line_word(output_.sequence(next_), status);
  if (lines == 1) {
    store_word(*to, word);
  } else {
    pack(to, reinterpret_cast<const std::byte*>(reply_.data()),
         output_.view.geometry.message_nbytes, word);
  }
  if (status != 0) write_dead_letter(status);
  ++next_;
  if (staging_ && ++staged_slots_ == run_) flush_staged();
  return true;
}

// As Producer::send() streams: the first slot goes last, by ordinary stores.
void CpuLoop::flush_staged() noexcept {
  if (staged_slots_ == 0) return;
  const u32 lines = output_.view.geometry.slot_lines;
  const u64 first = next_ - staged_slots_;
  for (u64 i = 1; i < staged_slots_; ++i) {
    Line* to = output_.slot(first + i);
    for (u32 line = 0; line < lines; ++line) stream_line(to + line, staged_[i * lines + line]);
  }
  stream_fence();
  Line* to = output_.slot(first);
  for (u32 line = 0; line < lines; ++line) {
    std::memcpy(to[line].payload, staged_[line].payload, line_payload_nbytes);
    store_word(to[line], load_word(staged_[line]));
  }
  staged_slots_ = 0;
}

void CpuLoop::account(u64 done, u64 seen_ns) noexcept {
  last_ns_ = now_ns();
  const u64 latency = last_ns_ - seen_ns;
  processed_ += done;
  latency_total_ns_ += latency * done;
  if (latency > latency_max_ns_) latency_max_ns_ = latency;
  if (latency < latency_min_ns_) latency_min_ns_ = latency;
  // A backlog and a handler that is quick: replies may wait for each other.
  staging_ = run_ != 0 && done >= least_streamed_slots &&
             latency < done * output_.view.geometry.slot_lines * fast_line_ns;
}

bool CpuLoop::has_room() noexcept {
  const u64 capacity = output_.view.geometry.capacity;
  if (next_ - output_head_ < capacity) return true;
  output_head_ = load(pair_.output->consumer.head);
  if (next_ - output_head_ > capacity) reason_ = EndReason::corrupted;  // a head beyond the tail
  return next_ - output_head_ < capacity;
}

i32 CpuLoop::call(const Line* from, void* reply) {
  auto* message = reinterpret_cast<std::byte*>(message_.data());
  unpack(message, from, input_.view.geometry.message_nbytes);
  const Geometry& out = output_.view.geometry;
  if (out.slot_lines == 1) {
    std::memset(reply, 0, line_payload_nbytes);
  } else {
    std::memset(reply, 0, out.message_nbytes);
  }
  return handler_(message, reply, state_.data);
}

// With the message as it was sent: the handler may have changed its copy.
void CpuLoop::write_dead_letter(i32 status) noexcept {
  ++errors_;
  last_error_ = status;
  if (pair_.dead_letter == nullptr) return;
  const Geometry& geometry = dead_letter_.view.geometry;
  if (dead_tail_ - load(pair_.dead_letter->consumer.head) >= geometry.capacity) {
    ++dropped_;
    return;
  }
  auto* message = reinterpret_cast<std::byte*>(message_.data());
  unpack(message, input_.slot(next_), geometry.message_nbytes);
  pack(dead_letter_.slot(dead_tail_), message, geometry.message_nbytes,
       layout::line_word(dead_letter_.sequence(dead_tail_), status));
  store(pair_.dead_letter->producer.tail, ++dead_tail_);
}

// While it is set, the host may use the handler's state.
void CpuLoop::set_paused(bool paused) noexcept {
  if (paused == paused_) return;
  paused_ = paused;
  store(pair_.control->is_paused, u32{paused});
}

void CpuLoop::publish(u64 now, bool always) noexcept {
  if (processed_ == published_ || (!always && now - published_ns_ < telemetry_interval_ns)) return;
  layout::ControlBlock& control = *pair_.control;
  store(control.messages_processed, processed_);
  store(control.last_activity, last_ns_);
  store(control.error_count, static_cast<u32>(errors_));
  store(control.last_error, last_error_);
  write_telemetry();
  published_ = processed_;
  published_ns_ = now;
}

void CpuLoop::write_telemetry() noexcept {
  layout::TelemetryBuffer& telemetry = *pair_.telemetry;
  const u64 sequence = load(telemetry.sequence);
  __atomic_store_n(&telemetry.sequence, sequence + 1, __ATOMIC_SEQ_CST);
  store(telemetry.processed, processed_);
  store(telemetry.dropped, dropped_);
  store(telemetry.latency_total_ns, latency_total_ns_);
  store(telemetry.latency_max_ns, latency_max_ns_);
  store(telemetry.latency_min_ns, latency_min_ns_);
  const u64 waiting = load(pair_.input->producer.tail) - next_;
  store(telemetry.queue_depth, waiting <= input_.view.geometry.capacity ? static_cast<u32>(waiting) : 0);
  store(telemetry.last_error, last_error_);
  store(telemetry.last_processed_ns, last_ns_);
  store(telemetry.sequence, sequence + 2);
}

void CpuLoop::wait(u64 now) noexcept {
  const u64 idle_ns = now - busy_ns_;
  if (idle_ns < idle_.spin_ns) {
    for (int look = 0; look < 32 && input_.state(next_) == Slots::SlotState::pending; ++look) {
      ring::pause();
    }
  } else if (idle_ns < idle_.yield_ns) {
    ::sched_yield();
  } else {
    const u64 nap = std::min(idle_ns / idle_.nap_share, idle_.longest_nap_ns);
    std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
  }
}

}  // namespace ringmem::ring
