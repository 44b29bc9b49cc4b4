// The pool with its eyes open: red zones around every block, poison in it, a check of stream order,
// and the place of allocation in every report.
//
// What it costs: 512 bytes a block, which the pool's figures count, and more where it is aligned; three fills and a host function when a block is allocated; two
// copies of 256 bytes, one fill and up to two host functions when it is freed. Nothing of it waits.
// Findings are made on the device's time and are collected with take_reports().
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "pool/pool.hpp"

namespace ringmem {

struct DebugReport {
  enum class Kind : std::uint8_t { underrun, overrun, double_free, foreign, unordered_use,
                                   unordered_free };
  Kind kind;
  DevicePtr ptr;
  std::size_t nbytes;
  std::string allocated_at;  // empty where the place is not known
  std::string message;
};

class DebugAllocator final : public Allocator {
 public:
  static constexpr std::size_t red_bytes = 256;        // on each side of a block
  static constexpr std::uint8_t red_byte = 0xfd;       // what they hold
  static constexpr std::uint8_t fresh_byte = 0xcd;     // a block that was never written
  static constexpr std::uint8_t freed_byte = 0xdd;     // a block that was freed

  // The pool must outlive it. Takes page-locked host memory for the red zones it looks at.
  explicit DebugAllocator(Pool& pool);
  // Waits for the checks under way: call it with no lock held.
  ~DebugAllocator() override;

  // Who knows where an allocation comes from, "model.py:12"; asked by each, with no lock held.
  static void ask_for_places(std::string (*place)());

  Block allocate(std::size_t nbytes, StreamHandle stream) override {
    return allocate(nbytes, stream, 0);
  }
  // `alignment` as for the pool, or 0.
  Block allocate(std::size_t nbytes, StreamHandle stream, std::size_t alignment);
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  // Says that the stream uses the block, and checks that it was ordered after the allocation.
  Status record_stream(Block& block, StreamHandle stream) override;
  Home home() const noexcept override { return pool_.home(); }

  // What was found since the last call.
  std::vector<DebugReport> take_reports();
  // The live block that starts at `ptr`, as its user sees it.
  bool find(DevicePtr ptr, Block* block) const;
  struct LiveBlock {
    DevicePtr ptr;
    std::size_t nbytes;
    std::string allocated_at;  // empty where the place is not known
  };
  std::vector<LiveBlock> live_blocks() const;

 private:
  struct Record;
  struct Check;
  struct Findings;

  Block enter(const std::shared_ptr<Record>& record);
  bool checkable(const Record& record, StreamHandle stream) noexcept;
  Check* get_check();
  Status launch(StreamHandle stream, HostFunction function, Check* check) noexcept;
  Status check_order(const std::shared_ptr<Record>& record, StreamHandle stream,
                     DebugReport::Kind kind) noexcept;
  void inspect(const std::shared_ptr<Record>& record, StreamHandle stream) noexcept;
  void report(DebugReport::Kind kind, const Block& block, const std::string& place,
              std::string message) noexcept;

  static void on_reached(void* argument);
  static void on_order_check(void* argument);
  static void on_red_zones(void* argument);

  Pool& pool_;
  Driver& driver_;
  std::shared_ptr<Findings> findings_;
  mutable std::mutex mutex_;
  std::unordered_map<DevicePtr, std::shared_ptr<Record>> live_;
  std::unordered_map<DevicePtr, std::string> freed_;  // where recently freed blocks came from
  std::vector<std::unique_ptr<Check>> checks_;
};

}  // namespace ringmem
