#include "pool/pages.hpp"

#include <algorithm>
#include <bit>
#include <chrono>

namespace ringmem::pool {
namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr std::size_t mib = std::size_t{1} << 20;

class Timer {
 public:
  explicit Timer(std::atomic<std::uint64_t>& total) : total_(total) {}
  ~Timer() {
    const auto spent = std::chrono::steady_clock::now() - start_;
    total_.fetch_add(static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count()), relaxed);
  }

 private:
  std::atomic<std::uint64_t>& total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

PhysicalProps props_of(int device, const PoolOptions& options) {
  return {{LocationKind::device, device}, options.shareable, options.rdma};
}

std::vector<AccessGrant> grants_of(int device, const PoolOptions& options) {
  std::vector<AccessGrant> grants{{{LocationKind::device, device}, Access::readwrite}};
  grants.insert(grants.end(), options.peers.begin(), options.peers.end());
  return grants;
}

}  // namespace

Pages::Pages(Driver& driver, int device, const PoolOptions& options, StreamOrder& streams,
             Heap& heap)
    : driver_(driver),
      device_(device),
      options_(options),
      streams_(streams),
      heap_(heap),
      limit_(options.limit),
      backing_(driver, device, props_of(device, options), grants_of(device, options)) {}

Status Pages::open(const char** failed) {
  if (backing_.is_open()) return Status::success;
  *failed = "cuMemGetInfo";
  MemoryInfo info;
  Status status = driver_.memory_info(device_, &info);
  if (!ok(status)) return status;
  device_bytes_ = info.total;
  status = open_range(info.total, failed);
  if (!ok(status)) return status;
  const std::size_t page = backing_.page_bytes();
  const std::size_t medium = backing_.nbytes() / 5 / page * page;
  const BiasedGuard guard(heap_.lock);
  heap_.medium.place(backing_.base(), medium, page);
  heap_.large.place(backing_.base() + medium, backing_.nbytes() - medium, page);
  return status;
}

Status Pages::find_page_bytes(std::size_t* nbytes, const char** failed) noexcept {
  int capable = 0;
  *failed = "cuDeviceGetAttribute";
  Status status = driver_.attribute(device_, Attribute::virtual_memory_management, &capable);
  if (ok(status) && capable) {
    *failed = "cuMemGetAllocationGranularity";
    status = backing_.find_page_bytes();
  }
  *nbytes = capable ? backing_.page_bytes() : Backing::chunk_page_bytes;
  return status;
}

// Addresses cost nothing, and moving pages uses them up until their old mappings go: ten times the
// device. A device without virtual memory has chunks instead.
Status Pages::open_range(std::size_t device_bytes, const char** failed) {
  int capable = 0;
  *failed = "cuDeviceGetAttribute";
  Status status = driver_.attribute(device_, Attribute::virtual_memory_management, &capable);
  if (!ok(status)) return status;
  if (!capable) {
    // Shareable handles and peers are a matter of mappings, which chunks have none of.
    if (options_.shareable || options_.rdma || !options_.peers.empty()) {
      return Status::not_supported;
    }
    return backing_.open_chunks(device_bytes * 10);
  }
  *failed = "cuMemGetAllocationGranularity";
  status = backing_.find_page_bytes();
  if (!ok(status)) return status;
  *failed = "cuMemAddressReserve";
  const std::size_t page = backing_.page_bytes();
  return backing_.open(device_bytes / page * page * 10, device_bytes);
}

std::size_t Pages::room() const noexcept {
  const std::size_t reserved = backing_.counters().reserved.load(relaxed);
  const std::size_t limit = limit_.load(relaxed);
  return std::min(limit > reserved ? limit - reserved : 0, device_room_);
}

// Once the device has refused memory, it is asked how much it has before each growth.
void Pages::ask_device() noexcept {
  MemoryInfo info;
  device_room_ = ok(driver_.memory_info(device_, &info))
                     ? info.free / backing_.page_bytes() * backing_.page_bytes()
                     : 0;
}

// What one growth creates at least: enough to make growth rare, too little to be felt.
std::size_t Pages::growth_step(const Space& space) const noexcept {
  const std::size_t page = backing_.page_bytes();
  const std::size_t held = space.end() - space.base();
  const std::size_t share = &space == &heap_.large ? held / 1024 : held / 16;
  return round_up(std::clamp(share, page, std::max(page, 32 * mib)), page);
}

// Handles for `nbytes`. Large ones cost fewer calls; but one live block holds a whole handle in its
// place, and what is free in it cannot move. Blocks end where others ended before, more or less, so
// handles are single pages at both ends and grow to 1/16 of the distance from the nearer end: then
// what a block of another size leaves free can mostly move. No smaller than 1/2048 of what is
// reserved (with `tight`: no larger), to keep their number in the low thousands; nor larger than
// 1/32 of the room there still is, because what is created last has to fit between everything else.
// `fine`: single pages. The figures are in docs/pool-design.md.
void Pages::cut_pieces(DevicePtr at, std::size_t nbytes, bool fine,
                       std::vector<Backing::Piece>* pieces) const {
  const std::size_t page = backing_.page_bytes();
  const std::size_t least = backing_.counters().reserved.load(relaxed) / 2048;
  const std::size_t largest = options_.tight ? least : 64 * mib;
  std::size_t left = room();
  std::size_t done = 0;
  while (nbytes) {
    const std::size_t graded = std::max(std::min(done, nbytes) / 16, least);
    std::size_t piece = fine ? page : std::min({graded, left / 32, largest}) / page * page;
    piece = std::min(std::max(piece, page), nbytes);
    pieces->push_back({at, piece, Backing::none});
    at += piece;
    nbytes -= piece;
    done += piece;
    left -= std::min(left, piece);
  }
}

Node* Pages::grow(Space& space, std::uint32_t units, Status* status, const char** failed) {
  const Timer timer(growth_ns_);
  *status = Status::success;
  if (backing_.chunked()) return create_chunk(space, units, status, failed);
  if (device_room_ != SIZE_MAX) {
    sweep();
    ask_device();
  }
  if (!options_.tight) {
    if (Node* node = create_at_end(space, units, status, failed)) return node;
    if (!ok(*status) && *status != Status::out_of_memory) return nullptr;
  }
  const Timer moving(remap_ns_);
  sweep();
  if (device_room_ != SIZE_MAX) ask_device();
  Attempt attempt;
  attempt.budget = options_.tight ? 0 : room();
  for (;;) {
    const bool fine = attempt.fine;
    Node* node = remap(space, units, &attempt, status, failed);
    if (node) {
      if (attempt.pending.mask) streams_.record(attempt.pending);
      return node;
    }
    const std::size_t given_up = give_up(attempt.unfit);
    if (given_up) attempt.budget = std::min(room(), attempt.budget + given_up);
    else if (attempt.lacking && attempt.budget < room()) attempt.budget = room();
    else if (attempt.fine == fine) return nullptr;
  }
}

// The tail grows by what it lacks.
Node* Pages::create_at_end(Space& space, std::uint32_t units, Status* status,
                           const char** failed) {
  Window window;
  std::size_t nbytes = 0;
  {
    const BiasedGuard guard(heap_.lock);
    window = end_window(space, units);
    nbytes = window.append;
    if (nbytes > room() || nbytes > space.room()) return nullptr;
    nbytes = std::min({std::max(nbytes, growth_step(space)), room() / backing_.page_bytes() *
                       backing_.page_bytes(), space.room()});
    window.append = nbytes;
    claim(space, &window);
  }
  Plan plan{&space, std::move(window), {}, {}, {}};
  cut_pieces(plan.window.parts.back()->ptr, nbytes, false, &plan.pieces);
  *status = backing_.fill(plan.pieces, failed);
  if (!ok(*status)) {
    if (*status == Status::out_of_memory) ask_device();
    roll_back(&plan);
    return nullptr;
  }
  return commit(&plan, units);
}

// A plain allocation of the driver, beside the others and joined to none. Where there is no room,
// the chunks that are all free go first.
Node* Pages::create_chunk(Space& space, std::uint32_t units, Status* status, const char** failed) {
  constexpr std::size_t usual = 32 * mib;
  const std::size_t page = backing_.page_bytes();
  const std::size_t least = round_up(std::size_t{units} * unit_bytes, page);
  for (const std::size_t nbytes : {std::max(least, usual), least, least}) {
    Plan plan{&space, {}, {}, {}, {}};
    if (nbytes <= room() && nbytes + page <= space.room()) {
      {
        const BiasedGuard guard(heap_.lock);
        space.become_stale(space.append(page));  // a gap that nothing is joined across
        plan.window.parts.push_back(space.append(nbytes));
        plan.window.was_free.push_back(false);
      }
      plan.pieces.push_back({plan.window.parts.front()->ptr, nbytes, Backing::none});
      *status = backing_.fill(plan.pieces, failed);
      if (ok(*status)) return commit(&plan, units);
      roll_back(&plan);
    }
    if (nbytes == least) (void)trim(0);
  }
  return nullptr;
}

// Those that could be given back. Of small free nodes first: what they hold is the least likely to
// be of use. Under the heap lock.
std::vector<std::uint32_t> Pages::free_handles() {
  const auto page_units = static_cast<std::uint32_t>(backing_.page_bytes() / unit_bytes);
  std::vector<std::uint32_t> handles;
  for (Space* space : {&heap_.medium, &heap_.large}) {
    move_cuts(*space);
    space->for_each_free(page_units, [&](const Node* node) {
      for_each_handle(*node, [&](std::uint32_t index) { handles.push_back(index); });
    });
  }
  return handles;
}

// Free neighbours that are too large for one node may meet inside a handle, which then lies in
// neither: they shall meet where it begins. Under the heap lock.
void Pages::move_cuts(Space& space) {
  if (space.end() - space.base() <= std::size_t{Space::most_units} * unit_bytes) return;
  for (Node* node = space.first(); node; node = node->next) {
    Node* next = node->next;
    if (!next || !node->is(NodeState::free) || !next->is(NodeState::free)) continue;
    const DevicePtr at = backing_.handle(backing_.handle_at(next->ptr)).at;
    if (at == next->ptr) continue;
    const Tag tag = node->tag;
    const Tag both = joined(tag, next->tag);
    space.detach(node);
    space.detach(next);
    Node* rest = node;
    if (at > node->ptr) {
      rest = space.cut(node, static_cast<std::uint32_t>((at - node->ptr) / unit_bytes));
    }
    space.absorb_next(rest);
    rest = space.give(rest, both);
    node = rest == node || at <= node->ptr ? rest : space.give(node, tag);
  }
}

Status Pages::trim(std::size_t keep) {
  sweep();
  for (;;) {
    std::vector<Leaving> leaving;
    {
      const BiasedGuard guard(heap_.lock);
      std::size_t free = heap_.medium.free_bytes() + heap_.large.free_bytes();
      for (const std::uint32_t index : free_handles()) {
        const std::size_t nbytes = backing_.handle(index).nbytes;
        if (free <= keep || nbytes > free - keep) continue;
        leaving.push_back(isolate(index, heap_.covering(backing_.handle(index).at)));
        free -= nbytes;
      }
    }
    if (leaving.empty()) return Status::success;
    if (const Status status = send_back(leaving); !ok(status)) return status;
  }
}

Status Pages::send_back(const std::vector<Leaving>& leaving) {
  Status first = Status::success;
  for (const Leaving& one : leaving) {
    const Status status = send_back(one);
    if (!ok(status) && ok(first)) first = status;
  }
  sweep();
  return first;
}

// Free handles that leave no more than `limit` reserved, and little less; false if there are not
// enough. `left`: what stays reserved then. Under the heap lock.
bool Pages::choose_leaving(std::size_t limit, std::vector<std::uint32_t>* chosen,
                           std::size_t* left) {
  *left = backing_.counters().reserved.load(relaxed);
  for (const Stale& stale : stale_) {  // on its way already
    if (stale.handle != Backing::none) *left -= backing_.handle(stale.handle).nbytes;
  }
  std::uint32_t smallest = Backing::none;  // of those that are larger than what is too much
  const auto nbytes = [&](std::uint32_t index) { return backing_.handle(index).nbytes; };
  for (const std::uint32_t index : free_handles()) {
    if (*left <= limit) return true;
    if (nbytes(index) <= *left - limit) {
      chosen->push_back(index);
      *left -= nbytes(index);
    } else if (smallest == Backing::none || nbytes(index) < nbytes(smallest)) {
      smallest = index;
    }
  }
  if (*left > limit && smallest != Backing::none) {
    chosen->push_back(smallest);
    *left -= nbytes(smallest);
  }
  return *left <= limit;
}

Status Pages::set_limit(std::size_t limit, std::size_t* least) {
  *least = 0;
  if (!backing_.is_open()) {
    limit_ = limit;
    return Status::success;
  }
  sweep();
  std::vector<Leaving> leaving;
  {
    const BiasedGuard guard(heap_.lock);
    std::vector<std::uint32_t> chosen;
    std::size_t left = 0;
    if (!choose_leaving(limit, &chosen, &left)) {
      *least = left;
      return Status::success;
    }
    limit_ = limit;
    for (const std::uint32_t index : chosen) {
      leaving.push_back(isolate(index, heap_.covering(backing_.handle(index).at)));
    }
  }
  return send_back(leaving);
}

void Pages::sweep() {
  streams_.poll();
  std::vector<Stale> left;
  for (Stale& stale : stale_) {
    const bool done = streams_.complete(stale.tag);
    if (!done) streams_.record(stale.tag);
    const bool due = stale.handle != Backing::none && (done || !backing_.chunked());
    if (due && ok(backing_.release(stale.handle, true))) stale.handle = Backing::none;
    if (!done || stale.handle != Backing::none ||
        !ok(backing_.unmap(stale.node->ptr, stale.node->nbytes()))) {
      left.push_back(stale);
      continue;
    }
    const BiasedGuard guard(heap_.lock);
    heap_.space_of(*stale.node).become_hole(stale.node);
  }
  stale_ = std::move(left);
}

}  // namespace ringmem::pool
