#include "ring/watchdog.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "driver/fork.hpp"
#include "ring/poller.hpp"
#include "ring/thread.hpp"

namespace ringmem::ring {
namespace {

// Each fork generation has its own: the parent's mutex may be held, and its thread is gone.
struct Current {
  std::uint64_t generation = ~std::uint64_t{0};
  Watchdog* watchdog = nullptr;
};

bool has_work(const KernelPair& pair) noexcept {
  const layout::ControlBlock& control = *pair.control;
  const u64 head = load(pair.input->consumer.head);
  const u64 capacity = load(pair.output->descriptor.capacity);
  return load(control.active) != 0 && load(control.should_pause) == 0 &&
         load(pair.input->producer.tail) != head &&
         head - load(pair.output->consumer.head) < capacity;
}

}  // namespace

Watchdog& Watchdog::instance() {
  static std::atomic<Current*> current{nullptr};
  Current* seen = current.load();
  const std::uint64_t generation = fork_generation();
  if (seen != nullptr && seen->generation == generation) return *seen->watchdog;
  auto* fresh = new Current{generation, new Watchdog};  // never destroyed, like the poller
  if (current.compare_exchange_strong(seen, fresh)) return *fresh->watchdog;
  delete fresh->watchdog;
  delete fresh;
  return *seen->watchdog;
}

Watchdog::Id Watchdog::watch(std::vector<KernelPair> pairs, std::chrono::nanoseconds stall) {
  std::lock_guard lock(mutex_);
  Entry entry{next_id_++, std::move(pairs), {}, stall};
  const auto now = Clock::now();
  for (const KernelPair& pair : entry.pairs) {
    entry.progress.push_back({load(pair.input->consumer.head), now});
  }
  start_locked();  // first: an entry that nobody was told of would outlive the memory it looks at
  entries_.push_back(std::move(entry));
  return entries_.back().id;
}

void Watchdog::forget(Id id) {
  std::lock_guard lock(mutex_);
  std::erase_if(entries_, [id](const Entry& entry) { return entry.id == id; });
  changed_.notify_all();
  wake_.notify_all();
}

Watchdog::Rings Watchdog::stalled(Id id) {
  std::lock_guard lock(mutex_);
  const Entry* entry = find(id);
  return entry != nullptr ? entry->stalled : Rings{};
}

std::optional<Watchdog::Rings> Watchdog::wait_for_change(Id id, const Rings& known,
                                                         std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] {
    const Entry* entry = find(id);
    return entry == nullptr || entry->stalled != known;
  });
  const Entry* entry = find(id);
  return entry != nullptr ? std::optional(entry->stalled) : std::nullopt;
}

Watchdog::Entry* Watchdog::find(Id id) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [id](const Entry& entry) { return entry.id == id; });
  return found != entries_.end() ? &*found : nullptr;
}

void Watchdog::start_locked() {
  if (running_) return;
  start_thread([this] { run(); });
  running_ = true;
}

void Watchdog::run() {
  pthread_setname_np(pthread_self(), "ringmem-watch");
  std::unique_lock lock(mutex_);
  while (!entries_.empty()) {
    const auto now = Clock::now();
    for (Entry& entry : entries_) look(entry, now);
    wake_.wait_for(lock, interval, [this] { return entries_.empty(); });
  }
  running_ = false;
}

void Watchdog::look(Entry& entry, Clock::time_point now) {
  Rings stalled;
  for (std::size_t i = 0; i < entry.pairs.size(); ++i) {
    const KernelPair& pair = entry.pairs[i];
    store(pair.control->heartbeat, load(pair.control->heartbeat) + 1);
    if (load(pair.control->has_terminated) != 0) {
      close_kernel_ends(pair);
      continue;
    }
    Progress& progress = entry.progress[i];
    const u64 head = load(pair.input->consumer.head);
    if (head != progress.head || !has_work(pair)) {
      progress = {head, now};
    } else if (now - progress.since >= entry.stall) {
      stalled.push_back(static_cast<u32>(i));
    }
  }
  if (stalled == entry.stalled) return;
  entry.stalled = std::move(stalled);
  changed_.notify_all();
}

}  // namespace ringmem::ring
