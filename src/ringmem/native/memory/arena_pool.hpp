// A pool of memory that the host uses too (pinned, managed): best fit over a few large arenas.
//
// A block that only the host used is free at once. A block that a stream used is free when that
// work is done, and not before even for the same stream: the host writes without asking a stream.
// Freed blocks of one size wait in a bin of that size, so a loop of allocate and free costs two
// locks; blocks are joined with their neighbours when a bin cannot serve.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "driver/fork.hpp"
#include "memory/allocator.hpp"
#include "memory/arena_sources.hpp"
#include "memory/driver_allocators.hpp"
#include "memory/reaper.hpp"

namespace ringmem {

struct ArenaPoolOptions {
  std::size_t limit = std::numeric_limits<std::size_t>::max();  // bytes that may be reserved
  std::size_t arena_bytes = std::size_t{64} << 20;  // the first; later ones double up to 1 GiB
};

struct ArenaPoolStatistics {
  std::size_t requested = 0;
  std::size_t allocated = 0;  // with what rounding to 512 bytes adds
  std::size_t reserved = 0;   // bytes of arenas
  std::size_t pending = 0;    // bytes freed that streams may still use
  std::size_t peak_requested = 0;
  std::size_t peak_allocated = 0;
  std::size_t peak_reserved = 0;
  std::size_t largest_free_block = 0;
  std::size_t live = 0;  // blocks
  std::size_t arenas = 0;
  std::uint64_t allocations = 0;
  std::uint64_t frees = 0;
  std::uint64_t misses = 0;   // allocations that needed an arena
  std::uint64_t retries = 0;  // allocations that waited for pending work
};

class ArenaPool final : public Allocator {
 public:
  ArenaPool(DriverRef driver, int device, std::unique_ptr<ArenaSource> source,
            ArenaPoolOptions options);
  ~ArenaPool() override;

  bool try_allocate(std::size_t nbytes, StreamHandle stream, Block* block) noexcept override;
  // Throws OutOfMemory, DriverError, InvalidValue, Closed.
  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  // With `no_stream` the block is free at once.
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Status record_stream(Block& block, StreamHandle stream) override;
  Home home() const noexcept override { return {driver_.get(), device_, source_->place()}; }
  StreamHandle idle_stream() const noexcept override { return no_stream; }

  std::size_t limit() const;
  void set_limit(std::size_t nbytes);  // throws InvalidValue below what is allocated
  // Makes sure that one allocation of `nbytes` needs no arena.
  void reserve(std::size_t nbytes);
  // Hands arenas without a live or pending block to the reaper until at most `keep_bytes` of
  // reserved memory are not allocated. Never waits.
  void trim(std::size_t keep_bytes);
  // False, and nothing happened, while blocks live. Arenas go when the work that uses them is done.
  bool close();
  bool closed() const;
  std::vector<Block> live_blocks() const;
  ArenaPoolStatistics statistics() const;
  void reset_peaks();

 private:
  enum class State : std::uint8_t { free, binned, live, pending };
  struct Arena {
    DevicePtr ptr = 0;
    std::size_t nbytes = 0;
  };
  struct Node {
    DevicePtr ptr = 0;
    std::size_t nbytes = 0;
    std::size_t requested = 0;  // while live
    Node* prev = nullptr;       // by address, within one arena
    Node* next = nullptr;
    Node* below = nullptr;      // in its bin, or among the spare ones
    State state = State::free;
    UsedStreams users;          // that were recorded
  };
  struct BySize {
    bool operator()(const Node* a, const Node* b) const noexcept {
      return a->nbytes != b->nbytes ? a->nbytes < b->nbytes : a->ptr < b->ptr;
    }
  };
  struct Pending {
    Node* node;
    std::vector<Guard> guards;
    UsedStreams closed;
  };
  struct Remains {  // of a closed pool
    std::vector<Arena> arenas;
    std::list<Pending> pending;
  };
  struct Bin {
    Node* top = nullptr;
    int depth = 0;
  };
  static constexpr std::size_t bins = 256;
  static constexpr int deepest_bin = 16;

  static std::size_t rounded(std::size_t nbytes) noexcept;
  Bin& bin_of(std::size_t nbytes) noexcept;
  bool foreign() const noexcept;
  void check_open() const;

  Node* take_locked(std::size_t nbytes);
  Node* best_fit_locked(std::size_t nbytes);
  void finish_locked(Node* node, std::size_t nbytes, Block* block) noexcept;
  void free_locked(Node* node);
  void join_locked(Node* node);
  void flush_bins_locked();
  Node* new_node_locked(DevicePtr ptr, std::size_t nbytes);
  void drop_node_locked(Node* node) noexcept;
  void add_arena_locked(DevicePtr ptr, std::size_t nbytes);
  std::size_t unused_locked() const noexcept;

  Status mark(const std::shared_ptr<UsedStream>& user, Pending* entry) noexcept;
  void unmark(std::vector<Guard>& guards) noexcept;
  bool settled(Pending& entry, bool wait) noexcept;
  void settle(bool wait);
  bool grow(std::size_t nbytes, Status* status, const char** operation);
  std::size_t next_arena(std::size_t nbytes) const;
  void release(const Arena& arena, std::vector<Guard> guards, UsedStreams closed);
  void release(Remains remains);
  Remains remains_locked() noexcept;
  [[noreturn]] void out_of_memory(std::size_t nbytes, Status status, const char* operation) const;

  const DriverRef driver_;
  const int device_;
  const std::unique_ptr<ArenaSource> source_;
  const std::uint64_t generation_;  // of forks
  EventCache events_;
  std::mutex growth_;         // one thread grows at a time; outer to mutex_
  mutable std::mutex mutex_;  // guards what follows; never held around a driver call
  ArenaPoolOptions options_;
  bool closed_ = false;
  std::vector<Arena> arenas_;
  std::array<Bin, bins> bins_{};
  std::set<Node*, BySize> free_;
  std::list<Pending> pending_;
  int settling_ = 0;        // threads that look at pending blocks, which are not in pending_ then
  std::deque<Node> nodes_;  // never shrinks: the record of a block freed twice is still a record
  Node* spare_ = nullptr;
  ArenaPoolStatistics figures_;
};

}  // namespace ringmem
