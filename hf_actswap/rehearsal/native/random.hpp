// Random numbers: PyTorch's kernels advance the device's generator; the numbers are the CPU's for the same seed and place.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/ivalue.h>

namespace rehearsal {

struct RandomState {
  uint64_t seed = 0, offset = 0;
  int argument = -1;

  // The state of the generator that an op is given, or of the device's own.
  static RandomState before(c10::DeviceIndex device, const c10::IValue& given, int argument) {
    RandomState found;
    at::Generator generator = given.isGenerator() ? given.toGenerator()
                                                  : at::globalContext().defaultGenerator(
                                                        c10::Device(c10::DeviceType::CUDA, device < 0 ? 0 : device));
    if (generator.device().is_cpu()) return found;
    std::lock_guard<std::mutex> guard(generator.mutex());
    found.seed = generator.current_seed();
    found.offset = generator.get_offset();
    found.argument = argument;
    return found;
  }

  // What a kernel does that draws numbers: the next one begins at another place.
  void advance(c10::DeviceIndex device) const {
    at::Generator generator = at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CUDA, device));
    std::lock_guard<std::mutex> guard(generator.mutex());
    generator.set_offset(offset + 4);
  }

  at::Generator generator() const {
    uint64_t mixed = (seed + 0x9e3779b97f4a7c15ull * (offset + 1));
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }
};

}  // namespace rehearsal
