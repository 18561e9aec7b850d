// Types and reductions of collectives. Sums are in rank order, of half precision in single precision and rounded once, so
// all ranks get the same bits.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace rehearsal {

enum Reductions { kSum, kProduct, kMost, kLeast, kAverage, kScaledSum };

struct Type {
  const char* name;
  uint64_t bytes;
};

// By number of ncclDataType_t.
inline const Type& type_of(int number) {
  static const Type all[] = {{"int8", 1},    {"uint8", 1},   {"int32", 4},    {"uint32", 4},     {"int64", 8},      {"uint64", 8},
                             {"float16", 2}, {"float32", 4}, {"float64", 8}, {"bfloat16", 2}, {"float8_e4m3", 1}, {"float8_e5m2", 1}};
  return all[number];
}

template <typename Value, typename Wide>
void reduce_as(char* to, const std::vector<const char*>& from, uint64_t count, int how, double scale) {
  auto value = [&](size_t rank, uint64_t i) { return (Wide)((const Value*)from[rank])[i]; };
  bool scales = how == kScaledSum || (how == kAverage && (Wide)0.5 != 0);
  Wide factor = (Wide)(how == kAverage ? 1.0 / from.size() : scale);
  for (uint64_t i = 0; i < count; i++) {
    Wide all = scales ? value(0, i) * factor : value(0, i);
    for (size_t rank = 1; rank < from.size(); rank++) {
      Wide next = value(rank, i);
      if (how == kProduct) all *= next;
      else if (how == kMost) all = std::max(all, next);
      else if (how == kLeast) all = std::min(all, next);
      else all += scales ? next * factor : next;
    }
    ((Value*)to)[i] = (Value)(how == kAverage && !scales ? all / (Wide)from.size() : all);
  }
}

// Reduce `count` elements of each rank; false: the type has no arithmetic.
inline bool reduce(char* to, const std::vector<const char*>& from, uint64_t count, int type, int how, double scale) {
  switch (type) {
    case 0: reduce_as<int8_t, int8_t>(to, from, count, how, scale); break;
    case 1: reduce_as<uint8_t, uint8_t>(to, from, count, how, scale); break;
    case 2: reduce_as<int32_t, int32_t>(to, from, count, how, scale); break;
    case 3: reduce_as<uint32_t, uint32_t>(to, from, count, how, scale); break;
    case 4: reduce_as<int64_t, int64_t>(to, from, count, how, scale); break;
    case 5: reduce_as<uint64_t, uint64_t>(to, from, count, how, scale); break;
    case 6: reduce_as<c10::Half, float>(to, from, count, how, scale); break;
    case 7: reduce_as<float, float>(to, from, count, how, scale); break;
    case 8: reduce_as<double, double>(to, from, count, how, scale); break;
    case 9: reduce_as<c10::BFloat16, float>(to, from, count, how, scale); break;
    default: return false;
  }
  return true;
}

}  // namespace rehearsal
