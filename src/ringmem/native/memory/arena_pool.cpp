#include "memory/arena_pool.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

namespace ringmem {
namespace {

constexpr std::size_t unit = 512;  // bytes
constexpr std::size_t largest_request = std::size_t{1} << 40;

}  // namespace

ArenaPool::ArenaPool(DriverRef driver, int device, std::unique_ptr<ArenaSource> source,
                     ArenaPoolOptions options)
    : driver_(std::move(driver)),
      device_(device),
      source_(std::move(source)),
      generation_(fork_generation()),
      events_(driver_),
      options_(options) {}

ArenaPool::~ArenaPool() {
  try {
    close();
  } catch (...) {  // no memory or no thread for the releases: the process's end does them
  }
}

std::size_t ArenaPool::rounded(std::size_t nbytes) noexcept {
  return (nbytes + unit - 1) / unit * unit;
}

ArenaPool::Bin& ArenaPool::bin_of(std::size_t nbytes) noexcept {
  return bins_[((nbytes / unit) * 0x9e3779b97f4a7c15ull) >> 56];
}

bool ArenaPool::foreign() const noexcept {
  return generation_ != fork_generation();
}

void ArenaPool::check_open() const {
  if (foreign()) {
    throw DriverError(refused_in_child(), "allocate",
                      "the pool belongs to the parent");
  }
  const std::lock_guard guard(mutex_);
  if (closed_) throw Closed("the pool is closed");
}

// --- allocate ------------------------------------------------------------------------------------

bool ArenaPool::try_allocate(std::size_t nbytes, StreamHandle, Block* block) noexcept {
  if (nbytes - 1 >= largest_request || foreign()) [[unlikely]] return false;
  const std::lock_guard guard(mutex_);
  if (closed_) [[unlikely]] return false;
  const std::size_t wanted = rounded(nbytes);
  Bin& bin = bin_of(wanted);
  Node* node = bin.top;
  if (node && node->nbytes == wanted) [[likely]] {
    bin.top = node->below;
    --bin.depth;
  } else {
    try {
      node = best_fit_locked(wanted);
    } catch (...) {  // no memory for the books
      return false;
    }
    if (!node) return false;
  }
  finish_locked(node, nbytes, block);
  return true;
}

// From cheap to dear: what is free, what pending work gives once joined, a new arena, and what
// waiting for pending work gives.
Block ArenaPool::allocate(std::size_t nbytes, StreamHandle stream) {
  Block block;
  if (try_allocate(nbytes, stream, &block)) return block;
  check_open();
  if (nbytes - 1 >= largest_request) {
    throw InvalidValue("nbytes is " + std::to_string(nbytes) + ": give 1 to 2**40 bytes");
  }
  const auto take = [&] {
    const std::lock_guard guard(mutex_);
    if (closed_) throw Closed("the pool is closed");
    Node* node = take_locked(rounded(nbytes));
    if (node) finish_locked(node, nbytes, &block);
    return node != nullptr;
  };
  settle(false);
  if (take()) return block;
  Status status = Status::success;
  const char* operation = "";
  for (int round = 0; round < 2; ++round) {
    {
      const std::lock_guard growing(growth_);
      if (take()) return block;  // somebody else has grown meanwhile
      if (grow(nbytes, &status, &operation) && take()) return block;
    }
    if (status != Status::out_of_memory || round == 1) break;
    {
      const std::lock_guard guard(mutex_);
      ++figures_.retries;
    }
    settle(true);
    Reaper::instance().flush(0.0);
    if (take()) return block;
  }
  out_of_memory(nbytes, status, operation);
}

ArenaPool::Node* ArenaPool::take_locked(std::size_t nbytes) {
  if (Node* node = best_fit_locked(nbytes)) return node;
  flush_bins_locked();
  return best_fit_locked(nbytes);
}

ArenaPool::Node* ArenaPool::best_fit_locked(std::size_t nbytes) {
  Node wanted;
  wanted.nbytes = nbytes;
  const auto found = free_.lower_bound(&wanted);
  if (found == free_.end()) return nullptr;
  Node* node = *found;
  if (node->nbytes == nbytes) {
    free_.erase(found);
    return node;
  }
  Node* rest = new_node_locked(node->ptr + nbytes, node->nbytes - nbytes);
  free_.erase(found);
  rest->prev = node;
  rest->next = node->next;
  if (rest->next) rest->next->prev = rest;
  node->next = rest;
  node->nbytes = nbytes;
  free_.insert(rest);
  return node;
}

void ArenaPool::finish_locked(Node* node, std::size_t nbytes, Block* block) noexcept {
  node->state = State::live;
  node->requested = nbytes;
  ArenaPoolStatistics& f = figures_;
  ++f.allocations;
  f.requested += nbytes;
  f.allocated += node->nbytes;
  f.peak_requested = std::max(f.peak_requested, f.requested);
  f.peak_allocated = std::max(f.peak_allocated, f.allocated);
  *block = {node->ptr, nbytes, node};
}

// --- deallocate ----------------------------------------------------------------------------------

Status ArenaPool::deallocate(const Block& block, StreamHandle stream) noexcept {
  if (foreign()) return refused_in_child();
  if (!block.record) return Status::illegal_state;
  Node* node = static_cast<Node*>(block.record);
  try {
    std::list<Pending> entry;
    UsedStreams users;
    UsedStreams recorded;  // both let go of without the lock
    std::shared_ptr<UsedStream> last;
    if (stream != no_stream) last = UsedStream::of(driver_, device_, stream);
    std::unique_lock guard(mutex_);
    if (node->state != State::live || node->ptr != block.ptr) return Status::illegal_state;
    if (last || !node->users.empty()) {
      users = node->users;
      if (last) add_stream(users, std::move(last));
      entry.push_back({node, {}, {}});
      node->state = State::pending;  // nobody else touches it meanwhile, and nothing throws
      guard.unlock();
      Status status = Status::success;
      for (const auto& user : users) {
        if (ok(status)) status = mark(user, &entry.front());
      }
      guard.lock();
      if (!ok(status)) {
        node->state = State::live;
        guard.unlock();
        unmark(entry.front().guards);
        return status;
      }
      pending_.splice(pending_.end(), entry);
      figures_.pending += node->nbytes;
    }
    recorded.swap(node->users);
    ++figures_.frees;
    figures_.requested -= node->requested;
    figures_.allocated -= node->nbytes;
    if (node->state == State::live) free_locked(node);
    return Status::success;
  } catch (...) {  // no memory for the books
    return Status::operating_system;
  }
}

void ArenaPool::free_locked(Node* node) {
  Bin& bin = bin_of(node->nbytes);
  if (bin.depth < deepest_bin && (!bin.top || bin.top->nbytes == node->nbytes)) [[likely]] {
    node->state = State::binned;
    node->below = bin.top;
    bin.top = node;
    ++bin.depth;
    return;
  }
  join_locked(node);
}

// The block and its free neighbours become one.
void ArenaPool::join_locked(Node* node) {
  node->state = State::free;
  if (Node* left = node->prev; left && left->state == State::free) {
    free_.erase(left);
    left->nbytes += node->nbytes;
    left->next = node->next;
    if (node->next) node->next->prev = left;
    drop_node_locked(node);
    node = left;
  }
  if (Node* right = node->next; right && right->state == State::free) {
    free_.erase(right);
    node->nbytes += right->nbytes;
    node->next = right->next;
    if (right->next) right->next->prev = node;
    drop_node_locked(right);
  }
  free_.insert(node);
}

void ArenaPool::flush_bins_locked() {
  for (Bin& bin : bins_) {
    while (Node* node = bin.top) {
      bin.top = node->below;
      --bin.depth;
      join_locked(node);
    }
  }
}

ArenaPool::Node* ArenaPool::new_node_locked(DevicePtr ptr, std::size_t nbytes) {
  Node* node = spare_;
  if (node) spare_ = node->below;
  else node = &nodes_.emplace_back();
  *node = Node{};
  node->ptr = ptr;
  node->nbytes = nbytes;
  return node;
}

void ArenaPool::drop_node_locked(Node* node) noexcept {
  node->state = State::free;
  node->below = spare_;
  spare_ = node;
}

Status ArenaPool::record_stream(Block& block, StreamHandle stream) {
  if (foreign()) return refused_in_child();
  if (!block.record) return Status::illegal_state;
  Node* node = static_cast<Node*>(block.record);
  auto user = UsedStream::of(driver_, device_, stream);
  const std::lock_guard guard(mutex_);
  if (node->state != State::live || node->ptr != block.ptr) return Status::illegal_state;
  add_stream(node->users, std::move(user));
  return Status::success;
}

// --- work under way ------------------------------------------------------------------------------

Status ArenaPool::mark(const std::shared_ptr<UsedStream>& user, Pending* entry) noexcept {
  try {
    if (!user->closed()) {
      Guard guard{user->device()};
      entry->guards.reserve(entry->guards.size() + 1);
      Status status = events_.take(guard.device, &guard.event);
      if (!ok(status)) return status;
      status = user->mark(guard);
      if (ok(status)) {
        entry->guards.push_back(guard);
        return status;
      }
      events_.give_back(guard.device, guard.event);
      if (!user->closed()) return status;
    }
    entry->closed.push_back(user);
    return Status::success;
  } catch (...) {  // no memory for the books
    return Status::operating_system;
  }
}

void ArenaPool::unmark(std::vector<Guard>& guards) noexcept {
  for (const Guard& guard : guards) events_.give_back(guard.device, guard.event);
  guards.clear();
}

// A device that failed has no work left that could use the memory.
bool ArenaPool::settled(Pending& entry, bool wait) noexcept {
  const auto over = [](Status status) {
    return status != Status::not_ready && !forbidden_by_capture(status);
  };
  return std::all_of(entry.guards.begin(), entry.guards.end(), [&](const Guard& guard) {
    return over(wait ? driver_->event_synchronize(guard.device, guard.event)
                     : driver_->event_query(guard.device, guard.event));
  }) && std::all_of(entry.closed.begin(), entry.closed.end(), [&](const auto& stream) {
    return over(wait ? stream->wait() : stream->query());
  });
}

// Frees the blocks whose work is done; with `wait`, all that are pending now. Hold no lock. Where the
// pool is closed meanwhile they are not freed, and the last to look hands the arenas out.
void ArenaPool::settle(bool wait) {
  std::list<Pending> looked_at;
  std::list<Pending> done;  // destroyed without the lock
  {
    const std::lock_guard guard(mutex_);
    if (pending_.empty()) return;
    looked_at.swap(pending_);
    ++settling_;
  }
  std::exception_ptr failure;  // no memory for the books
  for (auto entry = looked_at.begin(); entry != looked_at.end();) {
    const auto current = entry++;
    if (!settled(*current, wait)) continue;
    {
      const std::lock_guard guard(mutex_);
      if (closed_) break;
      done.splice(done.end(), looked_at, current);
      figures_.pending -= current->node->nbytes;
      try {
        free_locked(current->node);
      } catch (...) {
        failure = std::current_exception();
      }
    }
    unmark(current->guards);
  }
  Remains remains;
  {
    const std::lock_guard guard(mutex_);
    pending_.splice(pending_.begin(), looked_at);
    --settling_;
    remains = remains_locked();
  }
  release(std::move(remains));
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ringmem
