// Tensors of the device seen as tensors of the CPU: the same bytes, sizes and strides.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <optional>
#include <utility>

#include "random.hpp"

namespace rehearsal {

using torch::jit::Stack;

template <typename Call>
void each_tensor(const c10::IValue& value, const Call& call) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) call(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) call(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) each_tensor(element, call);
  }
}

// Begin and length of the bytes between the first and the last element.
inline std::pair<const char*, size_t> extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {(const char*)tensor.unsafeGetTensorImpl()->data(), (size_t)(last + 1) * tensor.element_size()};
}

// Bytes that a kernel reads or writes of a tensor: an expanded dimension counts once.
inline double touched_bytes(const at::Tensor& tensor) {
  double bytes = tensor.element_size();
  for (int64_t i = 0; i < tensor.dim(); i++)
    if (tensor.stride(i) || !tensor.size(i)) bytes *= tensor.size(i);
  return bytes;
}

inline at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::DeviceType::CPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(), tensor.strides(), options);
}

inline c10::IValue cpu_alias(const c10::IValue& value) {
  if (value.isTensor()) return cpu_alias(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(cpu_alias(tensor));
    return found;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> found;
    for (const c10::IValue& element : value.toListRef())
      found.push_back(element.isTensor() ? std::optional<at::Tensor>(cpu_alias(element.toTensor())) : std::nullopt);
    return found;
  }
  if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
  return value;
}

// The arguments of an op for the CPU's kernel. A generator becomes one of the CPU, at the same place of its numbers.
inline Stack on_cpu(const Stack& given, const std::optional<RandomState>& random) {
  Stack found;
  for (const auto& value : given) found.push_back(cpu_alias(value));
  if (random && random->argument >= 0) found[random->argument] = random->generator();
  return found;
}

inline at::Tensor widen(const at::Tensor& tensor, bool whole_numbers) {
  if (!tensor.defined()) return tensor;
  if (whole_numbers && at::isIntegralType(tensor.scalar_type(), false)) return tensor.to(c10::kDouble);
  bool half = tensor.scalar_type() == c10::kHalf || tensor.scalar_type() == c10::kBFloat16;
  return half ? tensor.to(c10::kFloat) : tensor;
}

// The arguments with all tensors of half precision in single precision, and whole numbers in double if asked.
inline Stack widened(const Stack& given, bool whole_numbers = false) {
  Stack found;
  for (const auto& value : given) {
    if (value.isTensor()) {
      found.push_back(widen(value.toTensor(), whole_numbers));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(widen(tensor, whole_numbers));
      found.push_back(list);
    } else {
      found.push_back(value);
    }
  }
  return found;
}

// Write values of the CPU into tensors of the device.
inline void put(const c10::IValue& into, const c10::IValue& values) {
  if (into.isTensor()) {
    const at::Tensor& target = into.toTensor();
    const at::Tensor& source = values.toTensor();
    if (!target.defined() || !source.defined() || !target.numel()) return;
    at::Tensor memory = cpu_alias(target);
    if (memory.data_ptr() == source.data_ptr()) return;
    memory.copy_(source.sizes() == memory.sizes() ? source : source.reshape(memory.sizes()));
  } else if (into.isTensorList()) {
    auto targets = into.toTensorVector(), sources = values.toTensorVector();
    for (size_t i = 0; i < targets.size(); i++) put(targets[i], sources[i]);
  }
}

}  // namespace rehearsal
