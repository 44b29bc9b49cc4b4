// Reading and checking a HostConfig.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

#include "driver/host/host_driver.hpp"
#include "driver/host/process.hpp"

namespace ringmem {
namespace {

constexpr int max_devices = 32;

[[noreturn]] void refuse(const std::string& key, const std::string& value,
                         const std::string& would_do) {
  throw InvalidValue(key + " is " + (value.empty() ? "empty" : value) + ": give " + would_do);
}

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\n");
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (;;) {
    const auto end = text.find(separator, begin);
    parts.push_back(trimmed(text.substr(begin, end - begin)));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

bool digits_only(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](char c) { return c >= '0' && c <= '9'; });
}

int parse_int(const std::string& key, const std::string& value, const std::string& would_do) {
  if (!digits_only(value) || value.size() > 6) refuse(key, value, would_do);
  return std::atoi(value.c_str());
}

bool parse_flag(const std::string& key, const std::string& value) {
  if (value == "1" || value == "true" || value == "on" || value == "yes") return true;
  if (value == "0" || value == "false" || value == "off" || value == "no") return false;
  refuse(key, value, "1 or 0");
}

double parse_seconds(const std::string& key, const std::string& value) {
  char* end = nullptr;
  const double seconds = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0') refuse(key, value, "a number of seconds, such as 0.05");
  return seconds;
}

std::size_t parse_bytes(const std::string& key, const std::string& value) {
  static constexpr const char* would_do = "a number of bytes, such as 1048576, 512MiB or 8GiB";
  char* end = nullptr;
  errno = 0;
  const double number = std::strtod(value.c_str(), &end);
  if (end == value.c_str() || errno != 0) refuse(key, value, would_do);
  const std::string unit = trimmed(end);
  static const std::pair<const char*, double> units[] = {
      {"", 1},   {"B", 1},       {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
      {"K", 0x1p10}, {"M", 0x1p20}, {"G", 0x1p30},   {"T", 0x1p40},   {"kB", 1e3},     {"MB", 1e6},
      {"GB", 1e9}, {"TB", 1e12}};
  for (const auto& [name, factor] : units) {
    if (unit != name) continue;
    const double nbytes = number * factor;
    if (!(nbytes >= 0 && nbytes <= 0x1p50)) break;
    return static_cast<std::size_t>(nbytes);
  }
  refuse(key, value, would_do);
}

void parse_peers(const std::string& value, HostConfig& config) {
  static constexpr const char* would_do =
      "all, none, or pairs of device numbers, such as 0-1 or 0-1+2-3";
  config.all_peers = value == "all";
  config.peers.clear();
  if (value == "all" || value == "none") return;
  for (const std::string& pair : split(value, '+')) {
    const auto ends = split(pair, '-');
    if (ends.size() != 2) refuse("peers", value, would_do);
    config.peers.emplace_back(parse_int("peers", ends[0], would_do),
                              parse_int("peers", ends[1], would_do));
  }
}

struct FlagKey {
  const char* name;
  bool HostConfig::*field;
};
constexpr FlagKey flag_keys[] = {
    {"strict", &HostConfig::strict},
    {"virtual_memory", &HostConfig::virtual_memory},
    {"export", &HostConfig::export_fd},
    {"pools", &HostConfig::pools},
    {"managed", &HostConfig::managed},
    {"concurrent_managed_access", &HostConfig::concurrent_managed_access},
    {"stream_mem_ops", &HostConfig::stream_mem_ops},
    {"host_register", &HostConfig::host_register},
    {"cooperative_launch", &HostConfig::cooperative_launch},
    {"host_numa", &HostConfig::host_numa},
};

void parse_entry(const std::string& key, const std::string& value, HostConfig& config) {
  for (const FlagKey& flag : flag_keys) {
    if (key != flag.name) continue;
    config.*flag.field = parse_flag(key, value);
    return;
  }
  if (key == "devices") {
    config.devices = parse_int(key, value, "a number of devices from 1 to 32");
  } else if (key == "capacity") {
    config.capacity = parse_bytes(key, value);
  } else if (key == "latency_s") {
    config.latency_s = parse_seconds(key, value);
  } else if (key == "peers") {
    parse_peers(value, config);
  } else if (key == "granularity") {
    config.granularity = parse_bytes(key, value);
  } else if (key == "max_mappings") {
    config.max_mappings = parse_bytes(key, value);
  } else if (key == "name") {
    config.name = value;
  } else {
    std::string known =
        "one of devices, capacity, latency_s, peers, granularity, max_mappings, name";
    for (const FlagKey& flag : flag_keys) known += std::string(", ") + flag.name;
    throw InvalidValue(key + " is " + value + ": no such setting; give " + known);
  }
}

}  // namespace

namespace host {

void validate(const HostConfig& config) {
  const auto shown = [](auto value) { return std::to_string(value); };
  if (config.devices < 1 || config.devices > max_devices)
    refuse("devices", shown(config.devices), "a number of devices from 1 to 32");
  if (!is_power_of_two(config.granularity) || config.granularity < page_bytes ||
      config.granularity > (std::size_t{1} << 30))
    refuse("granularity", shown(config.granularity), "a power of two from 4KiB to 1GiB");
  if (config.capacity < config.granularity || config.capacity > (std::size_t{1} << 44))
    refuse("capacity", shown(config.capacity), "one granule (2MiB by default) to 16TiB");
  if (!(config.latency_s >= 0 && config.latency_s <= 3600))
    refuse("latency_s", shown(config.latency_s), "0 to 3600 seconds");
  for (const auto& [a, b] : config.peers) {
    if (a < 0 || b < 0 || a >= config.devices || b >= config.devices || a == b)
      refuse("peers", shown(a) + "-" + shown(b),
             "two different devices from 0 to " + shown(config.devices - 1));
  }
}

}  // namespace host

HostConfig parse_host_config(const std::string& text) {
  HostConfig config;
  if (trimmed(text).empty()) return config;
  for (const std::string& entry : split(text, ',')) {
    if (entry.empty()) continue;
    const auto equals = entry.find('=');
    if (equals == std::string::npos)
      throw InvalidValue("\"" + entry +
                         "\" has no value: give key=value, such as devices=2");
    parse_entry(trimmed(entry.substr(0, equals)), trimmed(entry.substr(equals + 1)), config);
  }
  host::validate(config);
  return config;
}

}  // namespace ringmem
