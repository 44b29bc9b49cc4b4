// A tiny test harness: TEST(name) { CHECK(…); } and one TEST_MAIN() a file. A failed CHECK prints
// where and goes on; the executable's exit status is the number of failed tests (at most 99).
// Arguments select tests whose name contains one of them.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace ringmem::testing {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline std::atomic<int>& failures() {
  static std::atomic<int> count{0};
  return count;
}

inline bool add(const char* name, void (*body)()) {
  cases().push_back({name, body});
  return true;
}

inline void fail(const char* file, int line, const std::string& what) {
  ++failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <class T>
std::string shown(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else {
    std::ostringstream text;
    text << value;
    return text.str();
  }
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  fail(file, line, std::string(expression) + ": " + shown(a) + " is not " + shown(b));
}

inline int run(int argc, char** argv) {
  int failed = 0;
  for (const Case& one : cases()) {
    bool selected = argc < 2;
    for (int i = 1; i < argc; ++i) selected |= std::strstr(one.name, argv[i]) != nullptr;
    if (!selected) continue;
    const int before = failures();
    try {
      one.body();
    } catch (const std::exception& error) {
      fail(one.name, 0, std::string("threw ") + error.what());
    }
    const bool good = failures() == before;
    failed += !good;
    std::printf("%s %s\n", good ? "ok  " : "FAIL", one.name);
    std::fflush(stdout);
  }
  return failed < 99 ? failed : 99;
}

}  // namespace ringmem::testing

#define TEST(name)                                                                          \
  static void name();                                                                       \
  [[maybe_unused]] static const bool name##_added = ringmem::testing::add(#name, &name);    \
  static void name()

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) ringmem::testing::fail(__FILE__, __LINE__, "false: " #condition);     \
  } while (false)

#define CHECK_EQ(a, b) ringmem::testing::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// A driver call that must succeed.
#define CHECK_OK(call) CHECK_EQ((call), ringmem::Status::success)

// `statement` must throw `type`.
#define CHECK_THROWS(statement, type)                                                       \
  do {                                                                                      \
    bool thrown_ = false;                                                                   \
    try {                                                                                   \
      statement;                                                                            \
    } catch (const type&) {                                                                 \
      thrown_ = true;                                                                       \
    }                                                                                       \
    if (!thrown_)                                                                           \
      ringmem::testing::fail(__FILE__, __LINE__, #statement " did not throw " #type);       \
  } while (false)

#define TEST_MAIN() \
  int main(int argc, char** argv) { return ringmem::testing::run(argc, argv); }
