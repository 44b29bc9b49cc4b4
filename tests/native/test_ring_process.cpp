// Who signed an end of a ring, and whether that process lives: also when another has its number now.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "ring/process.hpp"
#include "ring/words.hpp"

using namespace ringmem;
using namespace ringmem::ring;

TEST(this_process_is_alive_and_says_when_it_started) {
  const ProcessId self = this_process();
  CHECK_EQ(self.pid, static_cast<u32>(::getpid()));
  CHECK(self.started != 0);
  CHECK_EQ(self.started, this_process().started);
  CHECK(is_alive(self));
}

TEST(a_process_with_the_number_of_a_dead_one_is_not_that_one) {
  ProcessId earlier = this_process();
  --earlier.started;
  CHECK(!is_alive(earlier));
  ProcessId another{static_cast<u32>(::getppid()), earlier.pid_namespace, 1};
  CHECK(!is_alive(another));
  another.started = 0;  // signed by one that could not tell
  CHECK(is_alive(another));
}

TEST(another_process_is_alive_until_it_ends) {
  int ends[2];
  CHECK_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const ProcessId self = this_process();
    const bool told = ::write(ends[1], &self, sizeof self) == sizeof self;
    ::pause();
    ::_exit(told ? 0 : 1);
  }
  ProcessId other;
  CHECK_EQ(::read(ends[0], &other, sizeof other), static_cast<ssize_t>(sizeof other));
  CHECK_EQ(other.pid, static_cast<u32>(child));
  CHECK(is_alive(other));
  ::kill(child, SIGKILL);
  siginfo_t info;
  CHECK_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  CHECK(!is_alive(other));  // a zombie
  ::waitpid(child, nullptr, 0);
  CHECK(!is_alive(other));
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(a_line_says_who_signed_it) {
  layout::ConsumerIndex line{};
  sign(line, {7, 8, 9});
  CHECK_EQ(signature(line).pid, 7u);
  CHECK_EQ(signature(line).pid_namespace, 8u);
  CHECK_EQ(signature(line).started, 9u);
  sign(line, {});
  CHECK_EQ(line.started, 0u);
}

TEST(devices_and_other_namespaces_count_as_alive) {
  CHECK(is_alive({}));
  const ProcessId self = this_process();
  CHECK(is_alive({self.pid, self.pid_namespace + 1, 1}));
}

TEST_MAIN()
