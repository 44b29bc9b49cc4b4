#include "pool/debug.hpp"

#include <algorithm>
#include <thread>
#include <utility>

namespace ringmem {

namespace {

std::atomic<std::string (*)()> place_of_caller{nullptr};
constexpr std::size_t freed_limit = 4096;  // freed blocks remembered for a second free

std::string named(StreamHandle stream) { return "stream " + std::to_string(stream); }

}  // namespace

// Shared with host functions that may still run when the allocator goes.
struct DebugAllocator::Findings {
  std::mutex mutex;
  std::vector<DebugReport> reports;

  void add(DebugReport report) {
    const std::lock_guard guard(mutex);
    reports.push_back(std::move(report));
  }
};

struct DebugAllocator::Record {
  Block whole;  // with the red zones
  Block block;  // as the user sees it
  StreamHandle stream;
  bool captured = false;  // allocated in the capture of a graph
  std::string place;
  std::atomic<bool> reached{false};  // the stream has come to the allocation
};

// One job of a host function. Reused once `busy` is off.
struct DebugAllocator::Check {
  std::atomic<bool> busy{true};
  std::shared_ptr<Findings> findings;
  std::shared_ptr<Record> record;
  StreamHandle stream = 0;
  DebugReport::Kind kind = DebugReport::Kind::unordered_use;
  std::uint8_t* zones = nullptr;  // pinned: the zone before, the zone after
};

DebugAllocator::DebugAllocator(Pool& pool)
    : pool_(pool), driver_(*pool.driver()), findings_(std::make_shared<Findings>()) {}

DebugAllocator::~DebugAllocator() {
  if (pool_.foreign()) return;  // the driver's threads, and its memory, are the parent's
  for (const auto& check : checks_) {
    while (check->busy.load(std::memory_order_acquire)) std::this_thread::yield();
    if (check->zones) (void)driver_.host_free(pool_.device(), check->zones);
  }
}

void DebugAllocator::ask_for_places(std::string (*place)()) { place_of_caller = place; }

// --- host functions: they run on the driver's threads and make no driver call ---------------------

void DebugAllocator::on_reached(void* argument) {
  auto* check = static_cast<Check*>(argument);
  check->record->reached.store(true, std::memory_order_release);
  check->record.reset();
  check->busy.store(false, std::memory_order_release);
}

void DebugAllocator::on_order_check(void* argument) {
  auto* check = static_cast<Check*>(argument);
  const Record& record = *check->record;
  if (!record.reached.load(std::memory_order_acquire)) {
    const bool use = check->kind == DebugReport::Kind::unordered_use;
    check->findings->add({check->kind, record.block.ptr, record.block.nbytes, record.place,
                          named(check->stream) + (use ? " uses" : " frees") + " a block of " +
                              named(record.stream) + " and did not wait for it"});
  }
  check->record.reset();
  check->busy.store(false, std::memory_order_release);
}

void DebugAllocator::on_red_zones(void* argument) {
  auto* check = static_cast<Check*>(argument);
  const Record& record = *check->record;
  const auto first_bad = [&](const std::uint8_t* zone) {
    return static_cast<std::size_t>(
        std::find_if(zone, zone + red_bytes, [](std::uint8_t b) { return b != red_byte; }) - zone);
  };
  const std::size_t before = first_bad(check->zones);
  const std::size_t after = first_bad(check->zones + red_bytes);
  if (before < red_bytes) {
    check->findings->add({DebugReport::Kind::underrun, record.block.ptr, record.block.nbytes,
                          record.place,
                          "written " + std::to_string(red_bytes - before) + " bytes before it"});
  }
  if (after < red_bytes) {
    check->findings->add({DebugReport::Kind::overrun, record.block.ptr, record.block.nbytes,
                          record.place,
                          "written at byte " + std::to_string(record.block.nbytes + after) +
                              ", behind its end"});
  }
  check->record.reset();
  check->busy.store(false, std::memory_order_release);
}

// --- allocate and free ------------------------------------------------------------------------------

DebugAllocator::Check* DebugAllocator::get_check() {
  const std::lock_guard guard(mutex_);
  for (const auto& check : checks_) {
    if (check->busy.load(std::memory_order_acquire)) continue;
    check->busy.store(true, std::memory_order_relaxed);
    return check.get();
  }
  auto check = std::make_unique<Check>();
  check->findings = findings_;
  checks_.push_back(std::move(check));
  return checks_.back().get();
}

Status DebugAllocator::launch(StreamHandle stream, HostFunction function, Check* check) noexcept {
  const Status status = driver_.launch_host_function(pool_.device(), stream, function, check);
  if (!ok(status)) {
    check->record.reset();
      check->busy.store(false, std::memory_order_release);
  }
  return status;
}

Block DebugAllocator::allocate(std::size_t nbytes, StreamHandle stream, std::size_t alignment) {
  // Keeps the alignment, unless the pool is about to refuse it.
  const std::size_t before = std::max(red_bytes, std::min(alignment, std::size_t{1} << 30));
  if (nbytes > unlimited - 4 * before) throw InvalidValue("nbytes is too large");
  auto record = std::make_shared<Record>();
  // The red zone after the block begins at its very end.
  const std::size_t whole = before + nbytes + red_bytes;
  record->whole = alignment == 0 ? pool_.allocate(whole, stream)
                                 : pool_.allocate(whole, stream, alignment);
  record->block = {record->whole.ptr + before, nbytes, record.get()};
  record->stream = stream;
  if (const auto place = place_of_caller.load()) record->place = place();
  const int device = pool_.device();
  const DevicePtr ptr = record->block.ptr;
  record->captured = is_capturing(driver_, device, stream);
  if (record->captured) return enter(record);
  Status status = driver_.fill_async(device, ptr - red_bytes, red_byte, 1, red_bytes, stream);
  if (ok(status)) status = driver_.fill_async(device, ptr, fresh_byte, 1, nbytes, stream);
  if (ok(status)) status = driver_.fill_async(device, ptr + nbytes, red_byte, 1, red_bytes, stream);
  if (ok(status)) {
    Check* check = get_check();
    check->record = record;
    status = launch(stream, on_reached, check);
  }
  if (!ok(status)) {
    (void)pool_.deallocate(record->whole, stream);
    check(status, "cuMemsetAsync");
  }
  return enter(record);
}

Block DebugAllocator::enter(const std::shared_ptr<Record>& record) {
  const std::lock_guard guard(mutex_);
  freed_.erase(record->block.ptr);
  live_[record->block.ptr] = record;
  return record->block;
}

// What a graph does is done whenever it is launched: nothing of it can be checked.
bool DebugAllocator::checkable(const Record& record, StreamHandle stream) noexcept {
  return !record.captured && !is_capturing(driver_, pool_.device(), stream);
}

Status DebugAllocator::record_stream(Block& block, StreamHandle stream) {
  std::shared_ptr<Record> record;
  {
    const std::lock_guard guard(mutex_);
    const auto found = live_.find(block.ptr);
    if (found == live_.end()) return Status::illegal_state;
    record = found->second;
  }
  if (stream != record->stream && checkable(*record, stream)) {
    const Status status = check_order(record, stream, DebugReport::Kind::unordered_use);
    if (!ok(status)) return status;
  }
  return pool_.record_stream(record->whole, stream);
}

// Has the stream look whether the allocating one has come to the allocation: if not, it did not wait.
// Finds what really happens out of order, and nothing that merely could.
Status DebugAllocator::check_order(const std::shared_ptr<Record>& record, StreamHandle stream,
                                   DebugReport::Kind kind) noexcept {
  Check* check = get_check();
  check->record = record;
  check->stream = stream;
  check->kind = kind;
  return launch(stream, on_order_check, check);
}

// Copies the red zones out and has them compared, in the order of the stream.
void DebugAllocator::inspect(const std::shared_ptr<Record>& record, StreamHandle stream) noexcept {
  const int device = pool_.device();
  Check* check = get_check();
  Status status = Status::success;
  if (!check->zones) {
    void* zones = nullptr;
    status = driver_.host_alloc(device, 2 * red_bytes, {}, &zones);
    check->zones = static_cast<std::uint8_t*>(zones);
  }
  const auto to = reinterpret_cast<DevicePtr>(check->zones);
  const Block& block = record->block;
  if (ok(status)) status = driver_.copy_async(device, to, block.ptr - red_bytes, red_bytes, stream);
  if (ok(status)) {
    status = driver_.copy_async(device, to + red_bytes, block.ptr + block.nbytes, red_bytes, stream);
  }
  if (ok(status)) {
    check->record = record;
    status = launch(stream, on_red_zones, check);
  } else {
    check->busy.store(false, std::memory_order_release);
  }
  (void)driver_.fill_async(device, block.ptr, freed_byte, 1, block.nbytes, stream);
}

Status DebugAllocator::deallocate(const Block& block, StreamHandle stream) noexcept {
  std::shared_ptr<Record> record;
  {
    const std::lock_guard guard(mutex_);
    const auto found = live_.find(block.ptr);
    if (found != live_.end()) {
      record = std::move(found->second);
      live_.erase(found);
      if (freed_.size() >= freed_limit) freed_.clear();
      freed_[block.ptr] = record->place;
    }
  }
  if (!record) {
    const std::lock_guard guard(mutex_);
    const auto found = freed_.find(block.ptr);
    const bool twice = found != freed_.end();
    report(twice ? DebugReport::Kind::double_free : DebugReport::Kind::foreign, block,
           twice ? found->second : std::string(),
           twice ? "freed twice" : "freed, and never allocated here");
    return Status::illegal_state;
  }
  if (checkable(*record, stream)) {
    if (stream != record->stream) {
      (void)check_order(record, stream, DebugReport::Kind::unordered_free);
    }
    inspect(record, stream);
  }
  return pool_.deallocate(record->whole, stream);
}

void DebugAllocator::report(DebugReport::Kind kind, const Block& block, const std::string& place,
                            std::string message) noexcept {
  findings_->add({kind, block.ptr, block.nbytes, place, std::move(message)});
}

std::vector<DebugReport> DebugAllocator::take_reports() {
  const std::lock_guard guard(findings_->mutex);
  return std::exchange(findings_->reports, {});
}

bool DebugAllocator::find(DevicePtr ptr, Block* block) const {
  const std::lock_guard guard(mutex_);
  const auto found = live_.find(ptr);
  if (found == live_.end()) return false;
  *block = found->second->block;
  return true;
}

std::vector<DebugAllocator::LiveBlock> DebugAllocator::live_blocks() const {
  std::vector<LiveBlock> blocks;
  const std::lock_guard guard(mutex_);
  for (const auto& [ptr, record] : live_) {
    blocks.push_back({ptr, record->block.nbytes, record->place});
  }
  return blocks;
}

}  // namespace ringmem
