#include "mapping/recycler.hpp"

#include <algorithm>
#include <tuple>

#include "driver/fork.hpp"
#include "mapping/arithmetic.hpp"
#include "mapping/limits.hpp"

namespace ringmem::mapping {
namespace {

// Small on purpose: a 2 MiB handle saves 8 µs of 28 when it is taken from here.
std::atomic<std::size_t> limit_nbytes{64 * mebibyte};

using Key = std::tuple<const Driver*, LocationKind, int, bool, bool>;

struct Registry {
  std::mutex mutex;
  std::map<Key, std::weak_ptr<Recycler>> recyclers;
  std::uint64_t generation = fork_generation();
};

// A forked child starts with an empty one: the parent's lock may be held for ever.
Registry& registry() {
  static std::atomic<Registry*> current{nullptr};
  Registry* have = current.load(std::memory_order_acquire);
  while (have == nullptr || have->generation != fork_generation()) {
    auto fresh = std::make_unique<Registry>();
    if (current.compare_exchange_strong(have, fresh.get(), std::memory_order_acq_rel)) {
      have = fresh.release();
    }
  }
  return *have;
}

}  // namespace

std::shared_ptr<Recycler> Recycler::of(const DriverRef& driver, const PhysicalProps& props) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.recyclers, [](const auto& entry) { return entry.second.expired(); });
  auto& slot = all.recyclers[Key{driver.get(), props.location.kind, props.location.id,
                                 props.shareable, props.rdma}];
  std::shared_ptr<Recycler> recycler = slot.lock();
  if (!recycler) slot = recycler = std::make_shared<Recycler>(driver, props);
  return recycler;
}

void Recycler::set_limit(std::size_t nbytes) noexcept { limit_nbytes.store(nbytes); }
std::size_t Recycler::limit() noexcept { return limit_nbytes.load(); }

// The mapping thread holds a reference while it cleans, so `cleaning_` is empty here except when
// that thread was stopped at exit; pages under a fill that still runs are then left to the driver.
Recycler::~Recycler() {
  if (process_.inherited()) {
    return;  // the handles' own destructors see that too
  }
  std::erase_if(cleaning_, [this](Cleaning& cleaning) { return end_cleaning(cleaning); });
  if (stream_ != 0) insist([this] { return driver_->stream_destroy(props_.location.id, stream_); });
}

PhysicalRef Recycler::take(std::size_t nbytes) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = clean_.find(nbytes);
  if (found == clean_.end() || found->second.empty()) return nullptr;
  PhysicalRef memory = std::move(found->second.back());
  found->second.pop_back();
  kept_.fetch_sub(nbytes, std::memory_order_relaxed);
  return memory;
}

Status Recycler::offer(PhysicalRef memory) noexcept {
  const std::size_t nbytes = memory->nbytes();
  const bool keepable = props_.location.kind == LocationKind::device && !memory->exported() &&
                        !memory->imported();
  if (keepable && kept_.fetch_add(nbytes, std::memory_order_relaxed) + nbytes <= limit()) {
    try {
      {
        std::lock_guard lock(mutex_);
        dirty_.push_back(memory);
      }
      Worker::post(shared_from_this());
      return Status::success;
    } catch (...) {  // no memory for the bookkeeping: release as if over the bound
    }
  }
  if (keepable) kept_.fetch_sub(nbytes, std::memory_order_relaxed);
  try {
    memory->close();
  } catch (const DriverError& error) {
    return error.status;
  }
  return Status::success;
}

void Recycler::drain_all(const Driver& driver) noexcept {
  std::vector<std::shared_ptr<Recycler>> found;
  try {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    for (auto& [key, slot] : all.recyclers) {
      if (std::get<0>(key) != &driver) continue;
      if (auto recycler = slot.lock()) found.push_back(std::move(recycler));
    }
  } catch (...) {  // no memory for the list: drain what was found
  }
  for (auto& recycler : found) recycler->drain();
}

void Recycler::drain() noexcept {
  std::map<std::size_t, std::vector<PhysicalRef>> clean;
  std::deque<PhysicalRef> dirty;
  {
    std::lock_guard lock(mutex_);
    clean.swap(clean_);
    dirty.swap(dirty_);
  }
  for (auto& [nbytes, handles] : clean) {
    for (PhysicalRef& memory : handles) forget(memory);
  }
  for (PhysicalRef& memory : dirty) forget(memory);
}

std::size_t Recycler::ready() noexcept {
  std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [nbytes, handles] : clean_) sum += nbytes * handles.size();
  return sum;
}

Job::Progress Recycler::step() noexcept {
  for (;;) {
    Cleaning next;
    {
      std::lock_guard lock(mutex_);
      if (dirty_.empty()) break;
      next.memory = std::move(dirty_.front());
      dirty_.pop_front();
    }
    if (!begin_cleaning(next)) forget(next.memory);
    else cleaning_.push_back(std::move(next));
  }
  std::erase_if(cleaning_, [this](Cleaning& cleaning) {
    return cleaning.guard->done() && end_cleaning(cleaning);
  });
  return cleaning_.empty() ? Progress::done : Progress::waiting;
}

// Maps the memory somewhere and starts the fill; undoes all of it when a call fails.
bool Recycler::begin_cleaning(Cleaning& cleaning) noexcept {
  const int device = props_.location.id;
  const std::size_t nbytes = cleaning.memory->nbytes();
  bool mapped = false;
  try {
    MappingTicket ticket(*driver_, 1);
    if (stream_ == 0) check(driver_->stream_create(device, StreamFlags{}, &stream_), "");
    check(driver_->address_reserve(nbytes, 0, 0, &cleaning.ptr), "");
    check(driver_->mem_map(cleaning.ptr, nbytes, cleaning.memory->handle()), "");
    mapped = true;
    const AccessGrant grant{props_.location, Access::readwrite};
    check(driver_->mem_set_access(cleaning.ptr, nbytes, &grant, 1), "");
    cleaning.guard = std::make_shared<Guard>(driver_);
    check(driver_->fill_async(device, cleaning.ptr, 0, 4, nbytes / 4, stream_), "");
    cleaning.guard = Guard::record(driver_, {StreamRef{device, stream_}});
    ticket.keep();
    return true;
  } catch (...) {
    // A fill that was started without an event to tell its end: wait for it, it is short.
    if (cleaning.guard) driver_->stream_synchronize(device, stream_);
    if (mapped) insist([&] { return driver_->mem_unmap(cleaning.ptr, nbytes); });
    if (cleaning.ptr != 0) insist([&] { return driver_->address_free(cleaning.ptr, nbytes); });
    return false;
  }
}

// False: the fill still runs or the pages cannot be unmapped; to be tried again.
bool Recycler::end_cleaning(Cleaning& cleaning) noexcept {
  const std::size_t nbytes = cleaning.memory->nbytes();
  if (!cleaning.guard->done()) return false;
  Status status = driver_->mem_unmap(cleaning.ptr, nbytes);
  if (cleaning.unmap_failed && gone(status)) status = Status::success;
  cleaning.unmap_failed = !ok(status);
  if (!ok(status)) return false;
  return_mappings(1);
  insist([&] { return driver_->address_free(cleaning.ptr, nbytes); });
  try {
    std::lock_guard lock(mutex_);
    clean_[nbytes].push_back(cleaning.memory);
  } catch (...) {
    forget(cleaning.memory);
  }
  return true;
}

void Recycler::forget(PhysicalRef& memory) noexcept {
  kept_.fetch_sub(memory->nbytes(), std::memory_order_relaxed);
  memory.reset();
}

}  // namespace ringmem::mapping
