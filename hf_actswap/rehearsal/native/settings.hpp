// What the launcher asks for, as `key=value` pairs separated by semicolons in one variable of the environment
// (hf_actswap/rehearsal/launch.py writes it).
#pragma once
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

namespace rehearsal {

struct Settings {
  std::map<std::string, std::string> values;

  Settings() {
    const char* found = getenv("HF_ACTSWAP_REHEARSAL");
    std::string text = found ? found : "";
    for (size_t at = 0; at < text.size();) {
      size_t end = text.find(';', at);
      if (end == std::string::npos) end = text.size();
      std::string pair = text.substr(at, end - at);
      size_t equals = pair.find('=');
      if (equals != std::string::npos) values[pair.substr(0, equals)] = pair.substr(equals + 1);
      at = end + 1;
    }
  }

  std::string text(const char* key, const char* otherwise) const {
    auto found = values.find(key);
    return found == values.end() ? otherwise : found->second;
  }

  double real(const char* key, double otherwise) const {
    auto found = values.find(key);
    return found == values.end() ? otherwise : strtod(found->second.c_str(), nullptr);
  }

  uint64_t number(const char* key, uint64_t otherwise) const {
    auto found = values.find(key);
    return found == values.end() ? otherwise : strtoull(found->second.c_str(), nullptr, 10);
  }
};

inline const Settings& settings() {
  static const Settings* one = new Settings();  // never destroyed: libraries call us while the process ends
  return *one;
}

}  // namespace rehearsal
