#include "driver/faulty/fault_plan.hpp"

#include <algorithm>

namespace ringmem {

void FaultPlan::fail(int operation, std::uint64_t nth, std::uint64_t times, Status status,
                     FaultWhen when) {
  std::lock_guard lock(mutex_);
  rules_.push_back({operation, nth - 1, times, status, when});
}

void FaultPlan::delay(int operation, std::chrono::duration<double> seconds) {
  std::lock_guard lock(mutex_);
  delays_[operation] = seconds;
}

void FaultPlan::clear() {
  std::lock_guard lock(mutex_);
  rules_.clear();
  delays_.clear();
  sticky_.clear();
}

Verdict FaultPlan::next(Operation operation, int device) {
  const int number = static_cast<int>(operation);
  std::lock_guard lock(mutex_);
  ++calls_[static_cast<std::size_t>(operation)];

  Verdict verdict;
  for (int key : {any_operation, number}) {
    if (auto found = delays_.find(key); found != delays_.end()) verdict.delay += found->second;
  }
  for (int key : {no_device, device}) {
    if (auto found = sticky_.find(key); found != sticky_.end()) {
      verdict.status = found->second;
      verdict.perform = false;
      return verdict;
    }
  }
  for (Rule& rule : rules_) {
    if (rule.operation != any_operation && rule.operation != number) continue;
    if (rule.skip > 0) {
      --rule.skip;
    } else if (rule.times > 0) {
      --rule.times;
      if (!ok(verdict.status)) continue;
      verdict.status = rule.status;
      verdict.perform = rule.when == FaultWhen::after;
      if (rule.when == FaultWhen::sticky) sticky_[device] = rule.status;
    }
  }
  return verdict;
}

std::array<std::uint64_t, operation_count> FaultPlan::calls() const {
  std::lock_guard lock(mutex_);
  return calls_;
}

std::size_t FaultPlan::pending() const {
  std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(rules_.begin(), rules_.end(), [](const Rule& rule) { return rule.times > 0; }));
}

}  // namespace ringmem
