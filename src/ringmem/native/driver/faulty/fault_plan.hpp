// Which calls fail, how, and how late: the pure part of FaultyDriver. Counts every call.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "driver/operations.hpp"
#include "driver/status.hpp"

namespace ringmem {

enum class FaultWhen : std::uint8_t {
  before,  // nothing is done
  after,   // done, then reported as failed; what a creating call made is destroyed again
  sticky,  // not done, and every later call on that device fails the same way
};

// What becomes of one call.
struct Verdict {
  Status status = Status::success;  // to report, where the real call succeeds
  bool perform = true;
  std::chrono::duration<double> delay{0};
};

class FaultPlan {
 public:
  static constexpr int any_operation = -1;
  static constexpr int no_device = -1;  // a call that names none; a sticky fault there is everywhere

  // The nth matching call from now on fails (1: the next), and the `times` - 1 matching calls
  // after it. Calls that another rule fails count too.
  void fail(int operation, std::uint64_t nth, std::uint64_t times, Status status, FaultWhen when);
  // Every matching call starts that much later; 0 takes the delay away.
  void delay(int operation, std::chrono::duration<double> seconds);
  void clear();  // rules, delays and sticky states; counters stay

  Verdict next(Operation operation, int device);

  std::array<std::uint64_t, operation_count> calls() const;
  std::size_t pending() const;  // rules that have not failed all their calls yet

 private:
  struct Rule {
    int operation;
    std::uint64_t skip;
    std::uint64_t times;
    Status status;
    FaultWhen when;
  };

  mutable std::mutex mutex_;
  std::vector<Rule> rules_;
  std::map<int, std::chrono::duration<double>> delays_;
  std::map<int, Status> sticky_;  // by device
  std::array<std::uint64_t, operation_count> calls_{};
};

}  // namespace ringmem
