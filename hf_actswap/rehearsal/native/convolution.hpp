#pragma once
// Convolutions without cuDNN, which needs a real device: what they return, in memory without values, and their FLOP.
#include <ATen/ATen.h>
#include <ATen/native/ConvUtils.h>

namespace rehearsal {

using torch::jit::Stack;

// The arguments of `convolution` or, with the gradient of its result in front, of `convolution_backward`.
class Convolution {
 public:
  explicit Convolution(const Stack& given)
      : given_(given), backward_(given.size() == 11), input_(argument(0).toTensor()), weight_(argument(1).toTensor()) {}

  Stack results() const {
    if (!backward_) return {at::empty(sizes(), input_.options(), layout())};
    auto asked = given_[10].toBoolList();
    at::Tensor to_input, to_weight, to_bias;
    if (asked[0]) to_input = at::empty_like(input_, input_.options(), layout());
    if (asked[1]) to_weight = at::empty_like(weight_, weight_.options(), layout());
    if (asked[2]) to_bias = at::empty({given_[0].toTensor().size(1)}, weight_.options());
    return {to_input, to_weight, to_bias};
  }

  // Two for each weight and each place that it meets; backward has as many for each gradient, but that of the bias.
  double flop() const {
    std::vector<int64_t> met = transposed() ? input_.sizes().vec() : backward_ ? given_[0].toTensor().sizes().vec() : sizes();
    double once = 2.0 * weight_.numel() * met[0];
    for (size_t i = 2; i < met.size(); i++) once *= met[i];
    if (!backward_) return once;
    auto asked = given_[10].toBoolList();
    return once * ((asked[0] ? 1 : 0) + (asked[1] ? 1 : 0));
  }

 private:
  // Input, weight, bias or its sizes, stride, padding, dilation, whether transposed, output padding, groups.
  const c10::IValue& argument(size_t i) const { return given_[i + (backward_ ? 1 : 0)]; }
  std::vector<int64_t> numbers(size_t i) const {
    auto found = argument(i).toIntVector();
    found.resize(input_.dim() - 2, found.back());
    return found;
  }
  bool transposed() const { return argument(6).toBool(); }

  std::vector<int64_t> sizes() const {
    auto stride = numbers(3), padding = numbers(4), dilation = numbers(5);
    if (!transposed()) return at::native::conv_output_size(input_.sizes(), weight_.sizes(), padding, stride, dilation);
    return at::native::conv_input_size(input_.sizes(), weight_.sizes(), padding, numbers(7), stride, dilation, argument(8).toInt());
  }

  // As cuDNN's: channels last where the input or the weight has them last.
  at::MemoryFormat layout() const {
    at::MemoryFormat of_input = input_.suggest_memory_format();
    return of_input == at::MemoryFormat::Contiguous ? weight_.suggest_memory_format() : of_input;
  }

  const Stack& given_;
  bool backward_;
  const at::Tensor &input_, &weight_;
};

}  // namespace rehearsal
