// The biased lock: one thread at a time, whoever owns it. tests/model/lock.pml checks its protocol;
// this, the code.
#include "pool/lock.hpp"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/membarrier.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace ringmem::pool;

namespace {

struct Counted {
  Counted() { BiasedLock::prepare(); }

  BiasedLock lock;
  long first = 0;  // equal outside the lock
  long second = 0;
  long torn = 0;

  void once() {
    const BiasedGuard guard(lock);
    torn += first != second;
    ++first;
    ++second;
  }
  void many(long times) {
    for (long i = 0; i < times; ++i) once();
  }
};

bool kernel_has_membarrier() {
  const long commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
  return commands > 0 && (commands & MEMBARRIER_CMD_PRIVATE_EXPEDITED);
}

// From now on this process's membarrier fails, but for the commands in `allowed`.
bool refuse_membarrier(int allowed) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(allowed), 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// Runs `body` in a child whose membarrier is refused; -1 where that cannot be had.
int in_sandbox(int allowed, int (*body)()) {
  const pid_t child = fork();
  if (child == 0) _exit(refuse_membarrier(allowed) ? body() : 77);
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status)) return 1;
  return WEXITSTATUS(status) == 77 ? -1 : WEXITSTATUS(status);
}

int count_together(bool owned_before) {
  Counted counted;
  counted.many(1000);
  const bool as_expected = counted.lock.owned() == owned_before;
  std::thread other([&] { counted.many(1000); });
  other.join();
  counted.many(1000);
  return as_expected && counted.torn == 0 && counted.first == 3000 ? 0 : 1;
}

}  // namespace

// First, while nobody has asked for barriers in this process.
TEST(without_membarrier_it_is_a_spin_lock) {
  const int failed = in_sandbox(-1, [] { return count_together(false); });
  if (failed < 0) std::printf("skipped: no seccomp\n");
  else CHECK_EQ(failed, 0);
}

// And nobody becomes the owner any more.
TEST(a_barrier_refused_later_is_survived) {
  if (!kernel_has_membarrier()) return;
  const int failed = in_sandbox(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, [] {
    if (count_together(true) != 0) return 1;
    return count_together(false);
  });
  if (failed < 0) std::printf("skipped: no seccomp\n");
  else CHECK_EQ(failed, 0);
}

TEST(a_streak_makes_an_owner_and_another_thread_ends_it) {
  Counted counted;
  counted.once();
  CHECK(!counted.lock.owned());
  counted.many(100);
  CHECK_EQ(counted.lock.owned(), kernel_has_membarrier());
  std::thread([&] { counted.once(); }).join();
  CHECK(!counted.lock.owned());
  counted.many(100);  // twice as many are needed now
  CHECK(!counted.lock.owned());
  counted.many(100);
  CHECK_EQ(counted.lock.owned(), kernel_has_membarrier());
}

TEST(the_ownership_goes_to_who_uses_it) {
  Counted counted;
  counted.many(100);
  std::thread([&] {
    counted.many(1000);
    CHECK_EQ(counted.lock.owned(), kernel_has_membarrier());
  }).join();
  counted.many(1000);
  CHECK_EQ(counted.lock.owned(), kernel_has_membarrier());
  CHECK_EQ(counted.first, 2100);
}

// Threads that all live: 32 can be owners.
TEST(after_many_owners_it_is_a_spin_lock_for_new_ones) {
  Counted counted;
  std::vector<std::thread> threads;
  std::atomic<int> turn{0};
  constexpr int count = 34;
  std::array<bool, count> owned{};
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      while (turn.load() != i) std::this_thread::yield();
      counted.many(10000);
      owned[static_cast<std::size_t>(i)] = counted.lock.owned();
      ++turn;
      while (turn.load() != count) std::this_thread::yield();
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(owned[31], kernel_has_membarrier());
  CHECK(!owned[32] && !owned[33]);
  CHECK_EQ(counted.torn, 0);
  CHECK_EQ(counted.first, count * 10000);
}

TEST(the_owner_and_others_never_meet) {
  for (const int others : {1, 3}) {
    Counted counted;
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    std::atomic<long> taken{0};
    for (int i = 0; i < others; ++i) {
      threads.emplace_back([&] {
        while (!stop.load()) {
          counted.once();
          taken += 1;
          for (int pause = 0; pause < 3000; ++pause) relax();
        }
      });
    }
    constexpr long times = 3000000;
    counted.many(times);
    stop = true;
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(counted.torn, 0);
    CHECK_EQ(counted.first, times + taken.load());
  }
}

TEST(threads_that_come_and_go_keep_it_whole) {
  Counted counted;
  for (int i = 0; i < 50; ++i) std::thread([&] { counted.many(200); }).join();
  CHECK_EQ(counted.torn, 0);
  CHECK_EQ(counted.first, 10000);
}

TEST_MAIN()
