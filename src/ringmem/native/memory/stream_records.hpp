// What allocators have in common that know a block only by its address: Block::record is the list of
// the streams that were recorded.
#pragma once

#include <algorithm>
#include <utility>

#include "memory/allocator.hpp"
#include "memory/used_stream.hpp"

namespace ringmem {

class StreamRecords : public Allocator {
 public:
  StreamRecords(DriverRef driver, int device) : driver_(std::move(driver)), device_(device) {}

  Status record_stream(Block& block, StreamHandle stream) override {
    std::shared_ptr<UsedStream> used = UsedStream::find(*driver_, stream);
    if (!used) {
      int owner = device_;  // events belong to the device of the stream: not the block's in a peer copy
      if (stream > per_thread_stream) {
        const Status status = driver_->stream_device(stream, &owner);
        if (status == Status::not_supported) owner = device_;  // old drivers: the usual case
        else if (!ok(status)) return status;
      }
      used = std::make_shared<UsedStream>(driver_, owner, stream);
    }
    if (!block.record) block.record = new UsedStreams;
    add_stream(*recorded(block), std::move(used));
    return Status::success;
  }

  // Behind a closed stream without an event, its device is waited for.
  bool free_may_block(const Block& block) const noexcept override {
    const UsedStreams* streams = recorded(block);
    return may_block() || (streams && std::any_of(streams->begin(), streams->end(), [](auto& used) {
             return used->closed() && !used->left_event();
           }));
  }

  void forget(const Block& block) noexcept override { delete recorded(block); }

 protected:
  static UsedStreams* recorded(const Block& block) noexcept {
    return static_cast<UsedStreams*>(block.record);
  }

  const DriverRef driver_;
  const int device_;
};

}  // namespace ringmem
