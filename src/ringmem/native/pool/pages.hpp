// Where the memory behind the spaces comes from: creates it, moves free pages to where a run is
// needed, and gives pages back. Each operation is planned under the heap lock, carried out by the
// driver without it, and then entered into the spaces or undone.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "pool/backing.hpp"
#include "pool/lock.hpp"
#include "pool/options.hpp"
#include "pool/space.hpp"
#include "pool/streams.hpp"

namespace ringmem::pool {

// The two spaces and the lock that guards them.
struct Heap {
  explicit Heap(const StreamOrder& streams) : medium(nodes, streams), large(nodes, streams) {}

  Space& space_of(const Node& node) noexcept { return node.ptr >= large.base() ? large : medium; }
  Node* covering(DevicePtr ptr) const noexcept {
    return ptr >= large.base() ? large.covering(ptr) : medium.covering(ptr);
  }

  mutable BiasedLock lock;
  NodeStore nodes;
  Space medium;  // small blocks' spans, and blocks under 1 MiB
  Space large;
};

class Pages {
 public:
  Pages(Driver& driver, int device, const PoolOptions& options, StreamOrder& streams, Heap& heap);

  // Held around every call below.
  std::mutex& mutex() noexcept { return mutex_; }

  // What one page holds: the least that can be reserved. Asks the device the first time.
  Status find_page_bytes(std::size_t* nbytes, const char** failed) noexcept;
  // Reserves the addresses; does nothing once that is done.
  Status open(const char** failed);
  // A live node of `units`, from memory created or moved; nullptr when there is none to be had:
  // then `status` and `failed` say what the driver answered, success if the limit was in the way.
  Node* grow(Space& space, std::uint32_t units, Status* status, const char** failed);
  // Gives back free handles until no more than `keep` bytes are free.
  Status trim(std::size_t keep);
  // Sets the limit and gives back what it does not allow. If pages in use do not allow the limit:
  // changes nothing, and `least` says what would do; else `least` is 0.
  Status set_limit(std::size_t limit, std::size_t* least);
  // Gives the addresses back; nothing may be mapped any more.
  Status close() noexcept { return backing_.close(); }
  // Unmaps addresses that nobody can use any more.
  void sweep();

  std::size_t limit() const noexcept { return limit_; }
  Backing& backing() noexcept { return backing_; }
  const Backing& backing() const noexcept { return backing_; }
  std::uint64_t growth_ns() const noexcept { return growth_ns_.load(); }
  std::uint64_t remap_ns() const noexcept { return remap_ns_.load(); }

 private:
  struct Stale {  // addresses still mapped to a handle that has moved or was released
    Node* node;
    Tag tag;
    std::uint32_t handle = Backing::none;  // still to be released: the driver refused, or said so
  };
  struct Source {  // free pages whose handles move
    Space* space;
    Node* node;
    Tag tag;
  };
  struct Window {  // the run to be made
    std::vector<Node*> parts;    // side by side
    std::vector<bool> was_free;  // of each part: else it was a hole
    std::size_t missing = 0;     // bytes that lack memory
    std::size_t append = 0;      // bytes of addresses to add after the parts
    std::size_t skip_front = 0;  // bytes of a first or last hole that are not needed
    std::size_t skip_back = 0;
    Tag tag;                     // of the free parts
  };
  struct Plan {
    Space* space;
    Window window;
    std::vector<Source> sources;
    std::vector<std::uint32_t> handles;
    std::vector<Backing::Piece> pieces;
  };

  Status open_range(std::size_t device_bytes, const char** failed);
  Node* create_chunk(Space& space, std::uint32_t units, Status* status, const char** failed);
  Node* create_at_end(Space& space, std::uint32_t units, Status* status, const char** failed);
  struct Attempt {
    std::size_t budget = 0;       // bytes that may be created
    bool fine = false;            // new memory comes in single pages
    Tag pending;                  // of large handles that could not be given back: not done yet
    // After a failure: what was lacking (0 if the driver failed), and handles to give back before
    // the next attempt, because what they hold would do if it came in other sizes.
    std::size_t lacking = 0;
    std::vector<std::uint32_t> unfit;
  };
  Node* remap(Space& space, std::uint32_t units, Attempt* attempt, Status* status,
              const char** failed);
  bool plan_pieces(Attempt* attempt, Plan* plan);
  bool leaves_little(const Plan& plan) const;
  std::vector<std::uint32_t> large_sources(const Plan& plan, Tag* pending) const;
  std::size_t give_up(const std::vector<std::uint32_t>& handles);
  std::uint32_t find_unfit(std::size_t nbytes) const;
  Window end_window(Space& space, std::uint32_t units) const;
  Window find_window(Space& space, std::uint32_t units) const;
  void claim(Space& space, Window* window);
  std::size_t take_source(Space& space, Node* node, std::size_t lacking, Plan* plan);
  std::size_t find_sources(std::size_t lacking, Plan* plan);
  struct Leaving {  // a handle on its way back to the driver, in a busy node of its own
    std::uint32_t handle;
    Node* node;
    Tag tag;
  };
  Leaving isolate(std::uint32_t index, Node* home);
  Status send_back(const Leaving& leaving);
  Status send_back(const std::vector<Leaving>& leaving);
  std::vector<std::uint32_t> free_handles();
  void move_cuts(Space& space);
  bool choose_leaving(std::size_t limit, std::vector<std::uint32_t>* chosen, std::size_t* left);
  // Calls visit(index) for every handle that lies whole inside a free node.
  template <typename Visit>
  void for_each_handle(const Node& node, Visit&& visit) const;
  Node* commit(Plan* plan, std::uint32_t units);
  void roll_back(Plan* plan);
  void roll_back_locked(Plan* plan, bool unmapped);
  std::size_t fresh_bytes(std::size_t lacking, std::size_t budget, bool all) const noexcept;
  void cut_pieces(DevicePtr at, std::size_t nbytes, bool fine,
                  std::vector<Backing::Piece>* pieces) const;
  std::size_t room() const noexcept;
  std::size_t most_bytes() const noexcept { return backing_.counters().reserved.load() + room(); }
  void ask_device() noexcept;
  std::size_t growth_step(const Space& space) const noexcept;

  Driver& driver_;
  const int device_;
  const PoolOptions options_;
  StreamOrder& streams_;
  Heap& heap_;
  std::mutex mutex_;
  std::atomic<std::size_t> limit_;
  std::size_t device_bytes_ = 0;
  std::size_t device_room_ = SIZE_MAX;  // what the device has left; unknown until it refused
  Backing backing_;
  std::vector<Stale> stale_;
  std::atomic<std::uint64_t> growth_ns_{0};
  std::atomic<std::uint64_t> remap_ns_{0};
};

template <typename Visit>
void Pages::for_each_handle(const Node& node, Visit&& visit) const {
  const std::size_t page = backing_.page_bytes();
  const DevicePtr end = node.end();
  for (DevicePtr at = round_up(node.ptr, page); at + page <= end;) {
    const std::uint32_t index = backing_.handle_at(at);
    const Backing::Handle& handle = backing_.handle(index);
    if (handle.at >= node.ptr && handle.at + handle.nbytes <= end) visit(index);
    at = handle.at + handle.nbytes;
  }
}

}  // namespace ringmem::pool
